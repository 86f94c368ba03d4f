"""A search as one call, for programs."""

from __future__ import annotations

from typing import Any

from evoengine.errors import UsageError
from evoengine.tuning.recorded import RecordedSearch
from evoengine.tuning.search import RECORDED, Search, SearchOptions, SearchResult
from evoengine.tuning.setup import Echo, silent


def tune(
    problem: str | None = None, gpu: str = "h100", *, trials: int = 60, echo: Echo = silent, **options: Any
) -> SearchResult:
    """Searches for the fastest correct kernel of a problem on a GPU; `options` are further fields of SearchOptions.

    A program that calls this must be importable: candidates run in processes of their own, which import its main module
    (`if __name__ == "__main__":`). Raises UsageError, MachineError.
    """
    unknown = options.keys() - set(SearchOptions.__slots__)
    if unknown:
        known = ", ".join(SearchOptions.__slots__)
        raise UsageError(f"tune knows no {', '.join(sorted(unknown))}; it takes {known}")
    asked = SearchOptions(problem=problem, gpu=gpu, trials=trials, **options)
    if asked.device.startswith(RECORDED):
        return RecordedSearch(asked, echo).run()
    return Search(asked, echo).run()
