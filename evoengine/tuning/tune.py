"""A search as one function call, for programs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Never

from evoengine.errors import UsageError
from evoengine.gpu import AUTO
from evoengine.hints import did_you_mean
from evoengine.search.first_build import FirstBuild
from evoengine.search.recorded import RECORDED
from evoengine.tuning.fleet import FleetSearch
from evoengine.tuning.recorded import RecordedSearch
from evoengine.tuning.search import Search, SearchOptions, SearchResult
from evoengine.tuning.setup import Echo, ThisMachine, checked, silent


def tune(
    problem: str | None = None,
    gpu: str = AUTO,
    *,
    gpu_file: Path | str | None = None,
    kernel: Path | str | None = None,
    triton: str | None = None,
    call: str | None = None,
    reference: str | None = None,
    families: Sequence[str] = (),
    trials: int | None = None,
    minutes: float | None = None,
    sampler: str | None = None,
    device: str = "auto",
    objective: str | None = None,
    space: Path | str | None = None,
    templates: Path | str | None = None,
    db: str | os.PathLike[str] | None = None,
    jobs: int | None = None,
    seed: int | None = None,
    resume: int | None = None,
    remeasure: bool = False,
    cluster: str | None = None,
    timeout: float | None = None,
    clock: str | None = None,
    echo: Echo = silent,
    **unknown: Never,
) -> SearchResult:
    """Search for the fastest correct kernel of a problem on a GPU; SearchOptions describes the options.

    A program that calls this must be importable: candidates run in processes of their own, which import its main module
    (`if __name__ == "__main__":`); one on standard input is not imported. Raises UsageError, MachineError.
    """
    options = {name: value for name, value in locals().items() if name not in ("echo", "unknown")}
    if unknown:
        known, near = ", ".join(SearchOptions.__slots__), did_you_mean(min(unknown), SearchOptions.__slots__)
        raise UsageError(f"tune has no parameter {', '.join(sorted(unknown))}; it takes {known}{near}")
    return prepare(SearchOptions(**checked(SearchOptions, options)), echo).run()


def prepare(
    options: SearchOptions, echo: Echo, on_stage: Echo = silent, begun: FirstBuild | None = None
) -> Search | RecordedSearch | FleetSearch:
    """Return a search that is ready to start, of kernels or of a recorded file.

    `on_stage` receives the current stage. `begun` is a build of the judges that the caller has begun, and closes.
    Raises UsageError, MachineError.
    """
    if options.cluster is not None:
        return FleetSearch([options], echo, on_stage)
    if options.device.startswith(RECORDED):
        return RecordedSearch(options, echo, on_stage)
    return Search(options, echo, on_stage, ThisMachine(begun))


def prepare_all(options: Sequence[SearchOptions], echo: Echo, on_stage: Echo = silent) -> FleetSearch:
    """Return searches that are ready to run at once, each on GPUs of its own. Raises UsageError, MachineError."""
    if options[0].cluster is None:
        listed = " and ".join(each.gpu for each in options)
        raise UsageError(f"--gpu is given {len(options)} times, {listed}; without --cluster it takes one value")
    return FleetSearch(options, echo, on_stage)
