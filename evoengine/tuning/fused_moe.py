"""Write the best configurations of vLLM's and SGLang's Triton kernels as their tuning files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from evoengine.errors import MachineError, NothingFound, UsageError, hint
from evoengine.gpu import Gpu
from evoengine.ledger.store import Ledger, open_ledger
from evoengine.paths import write_atomically
from evoengine.records import Candidate, Rejection
from evoengine.search.compilers import with_machine_code
from evoengine.search.finishing import is_judged, judge_export
from evoengine.tuning.setup import drawn_seed
from evoengine.workloads.triton_kernel import (
    Served,
    TritonWorkload,
    is_definition,
    served_entry,
    served_file_name,
    served_of,
)

Files = dict[str, dict[str, dict[str, int]]]
"""path below the folder → rows M → the configuration"""
Prove = Callable[[Ledger, Candidate], str | None]
"""returns why a configuration is not written; None if its gate is finished"""


@dataclass(frozen=True, slots=True)
class ServedFiles:
    files: Files
    left_out: tuple[str, ...]
    """a sentence for each problem that was left out"""


def find_fused_moe(ledger: Ledger, gpu: Gpu, prove: Prove) -> ServedFiles:
    """Return the files of the best configurations on one GPU. Raises NothingFound if the ledger holds none.

    If several runs have the same kernel and sizes, or the same row of a file, the last run's result is used.
    """
    files: Files = {}
    left_out = []
    for problem, kernel, served, sizes in _searched(ledger, gpu):
        found = _best_proven(ledger, problem, gpu, kernel, prove)
        if not isinstance(found, Candidate):
            left_out.append(f"{problem}: {found}")
            continue
        assert found.binary is not None  # it is ranked
        name = served_file_name(served, sizes, gpu, found.binary.compiler.removeprefix("triton "))
        if str(sizes["M"]) in files.setdefault(name, {}):
            left_out.append(f"{problem}: a later run has this M of {name}")
        else:
            files[name][str(sizes["M"])] = served_entry(found.config)
    if not any(files.values()):
        search = "evoengine search --triton FILE::fused_moe_kernel"
        why = "; ".join(left_out) or f"{search} with the file of vLLM or SGLang finds one (docs/virtual-gpu.md)"
        raise NothingFound(f"the ledger holds no configuration of vLLM's or SGLang's kernels on {gpu.key}: {why}")
    in_order = {name: dict(sorted(rows.items(), key=lambda row: int(row[0]))) for name, rows in sorted(files.items())}
    return ServedFiles(in_order, tuple(left_out))


def write_fused_moe(folder: Path, gpu: Gpu, db: str | None = None) -> tuple[list[Path], Sequence[str]]:
    """Write the files and return them, with a sentence for each problem that was left out.

    A configuration whose gate was not finished is judged first. If a file exists with other contents, nothing is
    written. Raises NothingFound, and UsageError if a file is in the way or cannot be written.
    """
    with open_ledger(db, create=False) as ledger:
        made = find_fused_moe(ledger, gpu, finish)
    texts = {folder / name: json.dumps(rows, indent=4) + "\n" for name, rows in made.files.items()}
    for path, text in texts.items():
        if path.exists() and not (path.is_file() and path.read_bytes() == text.encode()):
            raise UsageError(f"{path} exists with other contents; name a folder without it, or remove it first")
    for path, text in texts.items():
        write_atomically(path, [text])
    return list(texts), made.left_out


def is_finished(ledger: Ledger, candidate: Candidate) -> str | None:
    """Return why a configuration's gate is not finished according to the ledger, None if it is."""
    if candidate.imported_from is None and is_judged(ledger.verdicts(candidate.trial)):
        return None
    finish = hint("best", gpu=candidate.gpu, **{"fused-moe": "configs/"}, db=ledger.db)
    return f"the gate of trial {candidate.trial} is not finished: {finish} finishes it"


def finish(ledger: Ledger, candidate: Candidate) -> str | None:
    """Finish a configuration's gate; return why it did not pass, None if it did."""
    if is_finished(ledger, candidate) is None:
        return None
    winner = with_machine_code(ledger, candidate.trial)
    if isinstance(winner, Rejection):
        return f"trial {candidate.trial} does not compile here: {winner.reason}"
    try:
        judged = judge_export(ledger, winner, drawn_seed())
    except (UsageError, MachineError) as error:
        return str(error)
    return None if judged.correct else f"trial {candidate.trial}: {judged}"


def _searched(ledger: Ledger, gpu: Gpu) -> Iterator[tuple[str, str | None, Served, dict[str, int]]]:
    """Yield problem, identity, kernel and sizes of each search of such a kernel, the last run first."""
    seen = set()
    for run in reversed(ledger.runs()):
        if run.gpu != gpu.key or run.kernel is None or run.problem in seen:
            continue
        if run.definition is None or not is_definition(run.definition):
            continue
        workload = TritonWorkload(run.definition)
        if served := served_of(workload.host.text):
            seen.add(run.problem)
            yield run.problem, run.kernel, served, dict(workload.parse(run.problem).sizes)


def _best_proven(ledger: Ledger, problem: str, gpu: Gpu, kernel: str | None, prove: Prove) -> Candidate | str:
    """Return the fastest configuration that passes `prove`, or why there is none.

    One that fails is no longer ranked, so that the next one is tried.
    """
    asked = set[int]()
    while best := ledger.best(problem, gpu.key, top=1, kernel=kernel):
        if (why := prove(ledger, best[0])) is None:
            return best[0]
        if best[0].trial in asked:
            return why
        asked.add(best[0].trial)
    return "the ledger holds no correct configuration"
