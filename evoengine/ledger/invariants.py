"""What must hold between the rows of a ledger, as declarations: what a trial is said to be follows from what it has.

`evoengine db check` looks at all trials, an export at the one that it writes. Each row may be as it was written, and
these still be broken: by a fault of evoengine, or by a hand that knows of checksums.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sqlalchemy import text
from sqlalchemy.orm import Session

from evoengine.ledger import chains
from evoengine.ledger.models import CandidateRow
from evoengine.records import EXECUTOR


@dataclass(frozen=True, slots=True)
class Invariant:
    holds: str
    """of every trial, in a sentence"""
    broken: str
    """a condition in SQL: it is broken for the trial `c`, of the run `r`"""


_PASSED = (
    "EXISTS (SELECT 1 FROM verdicts p WHERE p.candidate_id = c.id AND p.outcome IS NULL AND p.short_only IS NULL"
    " AND CAST(p.cases AS text) <> '[]')"
)
_LAST_VERDICT = f"SELECT max(v.id) FROM verdicts v WHERE v.candidate_id = c.id AND v.device <> '{EXECUTOR}'"
_REFUTED = f"EXISTS (SELECT 1 FROM verdicts f WHERE f.id = ({_LAST_VERDICT}) AND f.outcome IS NOT NULL)"
_FIGURE = "EXISTS (SELECT 1 FROM measurements m WHERE m.candidate_id = c.id AND m.kind = c.outcome)"
_OWN = "r.imported_from IS NULL"
"""what other tuners say of their kernels is theirs to prove"""
_UNNAMED_DEVICES = "SELECT d.id FROM devices d WHERE NOT EXISTS (SELECT 1 FROM runs r WHERE r.device_id = d.id)"
"""each is written with its first run and removed with its last, so that runs note which devices there are"""

INVARIANTS = (
    Invariant(
        "a correct trial passed the gate, case by case",
        f"{_OWN} AND c.outcome IN ('measured', 'estimated', 'unranked') AND (NOT {_PASSED} OR {_REFUTED})",
    ),
    Invariant(
        "a ranked trial has a figure of the kind that its outcome names",
        f"c.outcome IN ('measured', 'estimated', 'recorded') AND NOT {_FIGURE}",
    ),
    Invariant(
        "an incorrect trial has a verdict that says so",
        f"{_OWN} AND c.outcome = 'incorrect' AND NOT EXISTS"
        " (SELECT 1 FROM verdicts v WHERE v.candidate_id = c.id AND v.outcome IS NOT NULL)",
    ),
    Invariant(
        "a trial whose end was taken over has the source of the trial that it names, which evaluated it",
        "c.taken_from IS NOT NULL AND EXISTS (SELECT 1 FROM candidates o WHERE o.id = c.taken_from AND"
        " (o.taken_from IS NOT NULL OR coalesce(o.source_sha256, '') <> coalesce(c.source_sha256, '')))",
    ),
    Invariant(
        "a trial that tries another one again has its configuration, and that one was cut short",
        "c.retry_of IS NOT NULL AND EXISTS (SELECT 1 FROM candidates o WHERE o.id = c.retry_of AND"
        " (o.config_key <> c.config_key OR coalesce(o.outcome, '') NOT IN ('killed', 'interrupted')))",
    ),
    Invariant(
        "a trial has the binary of its own source",
        "c.binary_id IS NOT NULL AND NOT EXISTS (SELECT 1 FROM binaries b WHERE b.id = c.binary_id"
        " AND b.source_sha256 = c.source_sha256)",
    ),
    Invariant(
        "a duplicate comes after a trial of its run with the same source",
        f"{_OWN} AND c.outcome = 'duplicate' AND NOT EXISTS (SELECT 1 FROM candidates o WHERE o.run_id = c.run_id"
        " AND o.source_sha256 = c.source_sha256 AND o.id < c.id)",
    ),
    Invariant("a trial with an outcome says when it ended", "c.outcome IS NOT NULL AND c.finished_at IS NULL"),
)


def violated(session: Session, trial: int | None = None) -> Iterator[str]:
    """A sentence for each trial and device, or for that trial, of which something does not hold."""
    of_one = "" if trial is None else " AND c.id = :trial"
    named = {} if trial is None else {"trial": trial}
    for invariant in INVARIANTS:
        query = f"SELECT c.id FROM candidates c JOIN runs r ON r.id = c.run_id WHERE {invariant.broken}{of_one}"
        for number in session.scalars(text(f"{query} ORDER BY c.id"), named):
            yield f"trial {number} breaks what must hold: {invariant.holds}"
    yield from _without_origin(session, trial)
    if trial is None:
        for device in session.scalars(text(f"{_UNNAMED_DEVICES} ORDER BY d.id")):
            yield f"device {device} breaks what must hold: a device is that of a run"


def _without_origin(session: Session, trial: int | None) -> Iterator[str]:
    """Of trials that took over the end of one which is not there, and was removed by nobody."""
    query = "SELECT c.id, c.taken_from FROM candidates c WHERE c.taken_from IS NOT NULL"
    query += "" if trial is None else " AND c.id = :trial"
    query += " AND NOT EXISTS (SELECT 1 FROM candidates o WHERE o.id = c.taken_from) ORDER BY c.id"
    named = {} if trial is None else {"trial": trial}
    orphans = session.execute(text(query), named).all()
    removed = chains.removed(session, CandidateRow.__tablename__) if orphans else set()
    for number, origin in orphans:
        if origin not in removed:
            yield f"trial {number} took over the end of trial {origin}, which is not there and was not removed"
