"""A search as one call, for programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from evoengine.errors import UsageError
from evoengine.gpu import AUTO
from evoengine.hints import did_you_mean
from evoengine.tuning.recorded import RecordedSearch
from evoengine.tuning.search import RECORDED, Search, SearchOptions, SearchResult
from evoengine.tuning.setup import Echo, silent


def tune(
    problem: str | None = None, gpu: str = AUTO, *, trials: int = 60, echo: Echo = silent, **options: Any
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


def prepare(options: SearchOptions, echo: Echo, on_stage: Echo = silent) -> Search | RecordedSearch:
    """A search that may begin, of kernels or of what a file recorded; `on_stage` is told what is being done meanwhile.
    Raises UsageError, MachineError."""
    return (RecordedSearch if options.device.startswith(RECORDED) else Search)(options, echo, on_stage)
