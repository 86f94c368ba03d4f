"""A search as one call, for programs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evoengine.errors import UsageError
from evoengine.gpu import AUTO
from evoengine.hints import did_you_mean
from evoengine.search.replay import RECORDED
from evoengine.tuning.fleet_search import FleetSearch
from evoengine.tuning.recorded import RecordedSearch
from evoengine.tuning.search import Search, SearchOptions, SearchResult
from evoengine.tuning.setup import Echo, silent


def tune(
    problem: str | None = None, gpu: str = AUTO, *, trials: int | None = None, echo: Echo = silent, **options: Any
) -> SearchResult:
    """Searches for the fastest correct kernel of a problem on a GPU; `options` are further fields of SearchOptions.

    A program that calls this must be importable: candidates run in processes of their own, which import its main module
    (`if __name__ == "__main__":`). Raises UsageError, MachineError.
    """
    unknown = options.keys() - set(SearchOptions.__slots__)
    if unknown:
        known, near = ", ".join(SearchOptions.__slots__), did_you_mean(min(unknown), SearchOptions.__slots__)
        raise UsageError(f"tune knows no {', '.join(sorted(unknown))}; it takes {known}{near}")
    for name in ("kernel", "gpu_file", "space", "templates"):
        if options.get(name) is not None:
            options[name] = Path(options[name])
    return prepare(SearchOptions(problem=problem, gpu=gpu, trials=trials, **options), echo).run()


def prepare(options: SearchOptions, echo: Echo, on_stage: Echo = silent) -> Search | RecordedSearch | FleetSearch:
    """A search that may begin, of kernels or of what a file recorded; `on_stage` is told what is being done meanwhile.
    Raises UsageError, MachineError."""
    if options.cluster is not None:
        return FleetSearch([options], echo, on_stage)
    return (RecordedSearch if options.device.startswith(RECORDED) else Search)(options, echo, on_stage)


def prepare_all(options: Sequence[SearchOptions], echo: Echo, on_stage: Echo = silent) -> FleetSearch:
    """Searches that may begin and run at once, each for GPUs of its own. Raises UsageError, MachineError."""
    if options[0].cluster is None:
        listed = " and ".join(each.gpu for each in options)
        raise UsageError(f"--gpu is given {len(options)} times, {listed}; without --cluster it takes one value")
    return FleetSearch(options, echo, on_stage)
