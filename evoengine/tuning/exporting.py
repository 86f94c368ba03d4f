"""The best kernel of a ledger, or one of its trials, as a folder to ship, after its machine code was executed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from evoengine.errors import MachineError, NothingFound, UsageError
from evoengine.formats.flashinfer_solution import trace_files
from evoengine.hints import hint
from evoengine.ledger.store import Ledger, open_ledger
from evoengine.ledger.transfer import is_elsewhere
from evoengine.publish.export import Grids, export_files
from evoengine.publish.export import export as write
from evoengine.publish.folder import require_place, with_checksums
from evoengine.records import Candidate, Rejection
from evoengine.search.binaries import check_export
from evoengine.search.recompile import with_machine_code
from evoengine.search.remeasure import spaces_of
from evoengine.search.targets import target_of
from evoengine.stages.binary_check import BinaryCheck
from evoengine.tuning.best import find_best
from evoengine.tuning.setup import Echo, silent
from evoengine.workloads.base import Target

MOST_SMS = 512
"""of a GPU that an exported kernel may meet"""


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
        first = find_best(ledger, problem, gpu, None if pareto else 1, pareto).candidates[0]
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
    ledger.require_proven(trial)
    winner = with_machine_code(ledger, trial)
    if isinstance(winner, Rejection):
        why = f"it was imported, and its source does not compile here: {winner.reason}"
        raise NothingFound(f"trial {trial} is not exported: {why}")
    if ledger.is_pruned(trial):
        again = hint("search", problem=winner.problem, gpu=winner.gpu, db=ledger.db)
        raise UsageError(f"trial {trial} has no source any more, as db prune took it out: {again} finds it again")
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


def bundle(ledger: Ledger, trial: int) -> dict[str, bytes]:
    """The files that `export_trial` would write, from what the ledger keeps: nothing is executed or compiled.

    Raises NothingFound where the trial is not known to be correct, where its machine code was refuted, or where it was
    imported, so that nothing here vouches for it.
    """
    ledger.require_proven(trial)
    winner = ledger.candidate(trial, with_cubin=True)
    if winner.outcome is None or not winner.outcome.correct or winner.refuted:
        ended = ": ".join(filter(None, [str(winner.outcome or "unfinished"), winner.reason]))
        raise NothingFound(f"trial {trial} is not exported, as it is not known to be correct: it ended as {ended}")
    if winner.source is None or winner.binary is None:
        raise NothingFound(f"trial {trial} was recorded by another tuner: the ledger has no kernel of it to export")
    if winner.imported_from is not None or is_elsewhere(winner.binary):
        raise NothingFound(
            f"trial {trial} was imported from {winner.imported_from}, so nothing here vouches for it: "
            f"{hint('best', trial=trial, export='out/', db=ledger.db)} executes it first"
        )
    target = target_of(ledger, winner)
    beside = trace_files(winner, target, silent)
    return with_checksums(export_files(winner, target, grids=_grids(ledger, winner, target), beside=beside))


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
