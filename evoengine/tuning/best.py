"""The best kernels of a ledger, and the best one as a folder to ship."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from evoengine.errors import MachineError, NothingFound, UsageError
from evoengine.formats.flashinfer_solution import trace_files
from evoengine.hints import hint
from evoengine.ledger.store import Ledger, open_ledger
from evoengine.objectives import front, stored_objectives
from evoengine.publish.export import Grids
from evoengine.publish.export import export as write
from evoengine.publish.folder import require_place
from evoengine.records import Candidate, Measurement, Rejection
from evoengine.search.binaries import check_export
from evoengine.search.recompile import with_machine_code
from evoengine.search.remeasure import spaces_of
from evoengine.search.targets import target_of
from evoengine.stages.binary_check import BinaryCheck
from evoengine.tuning.setup import Echo, silent
from evoengine.workloads.base import Target

MOST_SMS = 512
"""of a GPU that an exported kernel may meet"""


@dataclass(frozen=True, slots=True)
class Best:
    """`candidates` best first, all by figures that may be compared."""

    problem: str
    gpu: str
    candidates: tuple[Candidate, ...]


def best(
    problem: str | None = None, gpu: str | None = None, *, top: int = 10, pareto: bool = False, db: str | None = None
) -> Best:
    """The best kernels found; of the last run's problem and GPU where none are named. With `pareto` what nothing beats
    in all objectives of the last run.

    Raises NothingFound where the ledger holds none.
    """
    with open_ledger(db, create=False) as ledger:
        return _best(ledger, problem, gpu, top, pareto)


def export(
    folder: Path | str,
    problem: str | None = None,
    gpu: str | None = None,
    *,
    db: str | None = None,
    pareto: bool = False,
    echo: Echo = silent,
    on_stage: Echo = silent,
) -> list[Path]:
    """Writes the best kernel with its loader into `folder`, after its machine code was executed; gives the files.
    `on_stage` is told what is being done.

    Raises NothingFound where there is none, or where its machine code gave a wrong result.
    """
    with open_ledger(db, create=False) as ledger:
        first = _best(ledger, problem, gpu, None if pareto else 1, pareto).candidates[0]
        return _export(ledger, first.trial, Path(folder), echo, on_stage)


def export_trial(
    folder: Path | str, trial: int, *, db: str | None = None, echo: Echo = silent, on_stage: Echo = silent
) -> list[Path]:
    """As `export`, of a trial however fast it is. Raises NothingFound where it is not correct, with how it ended."""
    with open_ledger(db, create=False) as ledger:
        found = ledger.candidate(trial)
        if found.outcome is None or not found.outcome.correct:
            ended = ": ".join(filter(None, [str(found.outcome or "unfinished"), found.reason]))
            raise NothingFound(f"trial {trial} is not exported, as it is not known to be correct: it ended as {ended}")
        return _export(ledger, trial, Path(folder), echo, on_stage)


def _export(ledger: Ledger, trial: int, folder: Path, echo: Echo, on_stage: Echo) -> list[Path]:
    require_place(folder)  # before the machine code is executed, which takes a while
    on_stage("reading the ledger")
    winner = with_machine_code(ledger, trial)
    if isinstance(winner, Rejection):
        why = f"it was imported, and its source does not compile here: {winner.reason}"
        raise NothingFound(f"trial {trial} is not exported: {why}")
    if winner.source is None or winner.binary is None:
        raise UsageError(
            f"trial {winner.trial} was recorded by another tuner: the ledger has no kernel of it to export"
        )
    target = target_of(ledger, winner)
    on_stage("executing the machine code")
    winner = _executed(winner, check_export(ledger, winner), echo)
    beside = trace_files(winner, target, echo)
    on_stage("writing the files")
    return write(winner, target, folder, grids=_grids(ledger, winner, target), beside=beside)


def _best(ledger: Ledger, problem: str | None, gpu: str | None, top: int | None, pareto: bool) -> Best:
    gpu, problem = ledger.last_target(gpu, problem)
    found: Sequence[Candidate] = ledger.best(problem, gpu, top=top or 10)
    if not found:
        raise NothingFound(
            f"the ledger holds no correct candidate for {problem} on {gpu}: "
            f"{hint('history', db=ledger.db, problem=problem, gpu=gpu)} shows how each ended"
        )
    if pareto:
        found = _front(ledger, problem, gpu, found[0].ranked_by, top)
    return Best(problem, gpu, tuple(found))


def _executed(winner: Candidate, check: BinaryCheck, echo: Echo) -> Candidate:
    if check.refuted:
        raise NothingFound(f"trial {winner.trial} is not exported: {check}")
    echo(f"trial {winner.trial}: {check}")
    if winner.imported_from is None:
        return replace(winner, binary_verdict=check.verdict)
    if check.verdict is None:
        raise MachineError(
            f"trial {winner.trial} is not exported: it was imported from {winner.imported_from}, so nothing here "
            f"vouches for it, and {check}"
        )
    return replace(winner, verdict=check.verdict, binary_verdict=check.verdict)  # what the file said is no verdict


def _grids(ledger: Ledger, winner: Candidate, target: Target) -> Grids:
    """On GPUs with other numbers of SMs, by the rule of its run's space; a workload's own loader has its own rule."""
    if target.workload.loader():
        return {}
    try:
        space = spaces_of(ledger, [winner], target)[winner.run]
    except UsageError:  # of a space that today's rules refuse, as the check of its machine code has said
        return {}
    return space.grids_by_sms(winner.config, range(1, MOST_SMS + 1))


def _front(ledger: Ledger, problem: str, gpu: str, like: Measurement, top: int | None) -> Sequence[Candidate]:
    """The Pareto front over the objectives of the last run, by figures that may be compared with `like`."""
    aimed = next(r.objectives for r in reversed(ledger.runs()) if (r.problem, r.gpu) == (problem, gpu))
    objectives = stored_objectives(aimed)
    if len(objectives) == 1:
        raise UsageError(f"the last run aimed at {aimed} alone; search with --objective tflops,registers for a front")
    known = ledger.trials(problem=problem, gpu=gpu, ranked=True, resources=True)
    alike = (t for t in known if t.measurement and t.measurement.comparable(like))
    return [ledger.candidate(t.trial) for t in front(alike, objectives)[:top]]
