"""Several problems at once: by their texts, as a named set (`gemm:llama3-8b`), or as the lines of a file (`@FILE`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from evoengine.errors import UsageError
from evoengine.sandbox.untrusted import read_limited_text
from evoengine.workloads import parse_problem, workloads


def expand(texts: Sequence[str]) -> tuple[str, ...]:
    """Return the problems that the texts stand for, each once, in their order and in the form a ledger has them.

    Raises UsageError for a text that is no problem, an unreadable or empty file, and problems of unlike workloads.
    """
    parsed = dict.fromkeys(str(parse_problem(problem)[1]) for problem in expanded(texts))
    kinds = dict.fromkeys(problem.partition(":")[0] if ":" in problem else "attention" for problem in parsed)
    if len(kinds) > 1:
        raise UsageError(f"problems of one search are of one workload, and these are of {' and '.join(kinds)}")
    return tuple(parsed)


def expanded(texts: Sequence[str]) -> list[str]:
    """Return the problems that the texts stand for as written. Raises UsageError as `expand` does for files."""
    return [problem for text in texts for problem in _expanded(text)]


def stands_for_several(text: str) -> bool:
    return text.startswith("@") or text in _sets()


def _expanded(text: str) -> Sequence[str]:
    if text.startswith("@"):
        return _lines(Path(text[1:]))
    return _sets().get(text, (text,))


def _sets() -> dict[str, tuple[str, ...]]:
    return {f"{w.name}:{name}": found for w in workloads().values() for name, found in w.problem_sets().items()}


def _lines(file: Path) -> list[str]:
    """Return the problems of a file, one a line; what follows a # is a remark."""
    try:
        lines = read_limited_text(file).splitlines()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"the file of problems {file} cannot be read: {why}") from error
    found = [line for line in (line.partition("#")[0].strip() for line in lines) if line]
    if not found:
        raise UsageError(f"the file {file} holds no problem; write one a line")
    if nested := next((line for line in found if stands_for_several(line) and line.startswith("@")), None):
        raise UsageError(f"the file {file} names a file, {nested}; it takes problems and named sets")
    return [problem for line in found for problem in _sets().get(line, (line,))]
