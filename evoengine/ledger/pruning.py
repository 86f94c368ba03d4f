"""Takes the sources and the machine code of losers out of a ledger: most of its bytes, and least of what is asked for.

Configurations, verdicts, figures and lineage stay. What was taken is made again where a search comes to it again.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from itertools import islice

from sqlalchemy import delete, func, or_, select, update
from sqlalchemy.orm import Session

from evoengine.ledger import chains
from evoengine.ledger.models import BinaryRow, CandidateRow, MachineCodeRow, RunRow, SourceRow
from evoengine.ledger.ranking import read_order
from evoengine.ledger.runs import RUNNING

BATCH = 500


@dataclass(frozen=True, slots=True)
class Pruned:
    sources: int
    binaries: int
    packed_bytes: int


def prune(session: Session, keep: int, before: datetime | None) -> Pruned:
    """Of finished trials that are not among the best `keep` of their problem and GPU, and that ended before that time
    where one is named. Trials of runs that go on keep theirs, and so does whatever shares a source with one that does.
    """
    held = _packed_bytes(session)
    kept = _sources_of_best(session, keep)
    in_use = [CandidateRow.outcome.is_(None), RunRow.status == RUNNING]
    if before is not None:
        in_use.append(or_(CandidateRow.finished_at.is_(None), CandidateRow.finished_at >= before))
    using = select(CandidateRow.id).join(RunRow).where(CandidateRow.source_sha256 == SourceRow.sha256, or_(*in_use))
    unused = select(SourceRow.sha256).where(SourceRow.packed.is_not(None), ~using.exists())
    wanted = iter([sha256 for sha256 in session.scalars(unused).all() if sha256 not in kept])
    sources = 0
    while batch := list(islice(wanted, BATCH)):
        session.execute(update(SourceRow).where(SourceRow.sha256.in_(batch)).values(packed=None))
        sources += len(batch)
    made_of = select(BinaryRow.id).join(SourceRow, SourceRow.sha256 == BinaryRow.source_sha256)
    needed = made_of.where(BinaryRow.cubin_sha256 == MachineCodeRow.sha256, SourceRow.packed.is_not(None))
    binaries = session.scalars(select(func.count()).select_from(MachineCodeRow).where(~needed.exists())).one()
    session.execute(delete(MachineCodeRow).where(~needed.exists()))
    chains.sign(session.connection(), chains.LEDGER, chains.PRUNED, f"{sources} sources, {binaries} binaries")
    return Pruned(sources, binaries, held - _packed_bytes(session))


def _sources_of_best(session: Session, keep: int) -> set[str | None]:
    kept: set[str | None] = set()
    for problem, gpu in session.execute(select(RunRow.problem, RunRow.gpu).distinct()).all():
        best = iter(read_order(session, problem, gpu, keep))
        while batch := list(islice(best, BATCH)):
            kept |= set(session.scalars(select(CandidateRow.source_sha256).where(CandidateRow.id.in_(batch))))
    return kept


def _packed_bytes(session: Session) -> int:
    tables = (SourceRow, MachineCodeRow)
    return sum(session.scalar(select(func.sum(func.length(row.packed)))) or 0 for row in tables)
