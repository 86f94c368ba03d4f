"""Judge an exported kernel again by its verification record, without a ledger, a GPU or a network."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from evoengine.errors import MachineError
from evoengine.gpu import find_gpu, known_gpus
from evoengine.gpu_file import stored_fields
from evoengine.publish.record import Record, read_record
from evoengine.records import EMULATOR, EXECUTOR, CaseResult, Judged, Rejection
from evoengine.search.finishing import judge_once
from evoengine.search.targets import restored_workload
from evoengine.space.space import space_from_text
from evoengine.tuning.arguments import checked
from evoengine.tuning.setup import Echo, require_compilers, silent
from evoengine.tuning.verify import Verified
from evoengine.workloads.base import Target


@dataclass(frozen=True, slots=True, repr=False)
class Attested(Verified):
    """The verdicts of this machine, with their differences from those of the record."""

    differences: tuple[str, ...] = ()
    """cases that ended otherwise here than in the record"""


def verify_record(
    record: Path | str | os.PathLike[str],
    *,
    key: Path | str | None = None,
    echo: Echo = silent,
    on_stage: Echo = silent,
) -> Attested:
    """Judge the kernel of a verification record by both judges, on the record's cases with the record's seed.

    With `key`, a public key in PEM, the record must be signed by it. Raises UsageError for what is no record or not
    signed by the key, MachineError where neither judge can judge here.
    """
    checked(verify_record, {"record": record, "key": key})
    on_stage("reading the record")
    found = read_record(Path(record), None if key is None else Path(key))
    target = _target(found)
    space = space_from_text(found.run.space_text, found.run.space_name, target.problem, target.gpu)
    require_compilers(target.gpu, emulated=True)
    on_stage("executing the machine code and the text")
    judged = judge_once(target, space, found.contender, found.seed)
    if isinstance(judged, Rejection):
        raise MachineError(f"the kernel of {record} cannot be judged here: {judged.reason}")
    by = {verdict.device: verdict for verdict in judged.verdicts}
    candidate = replace(found.candidate, verdict=by.get(EMULATOR), binary_verdict=by.get(EXECUTOR))
    return Attested(candidate, found.seed, judged, tuple(_differences(found.judged, judged)))


def _target(record: Record) -> Target:
    """Return the problem, workload and GPU of a record. Raises UsageError where they are not known here."""
    run = record.run
    workload = restored_workload(run.problem, run.definition)
    described = run.gpu_definition if run.gpu not in known_gpus() else None
    gpu = find_gpu(run.gpu) if described is None else stored_fields(described, "the record's description of its GPU")
    return Target(workload, workload.parse(run.problem), gpu)


def _differences(stated: Judged, found: Judged) -> list[str]:
    """Return a sentence for each case that did not end as the record states."""
    own = {(v.device, c.name, c.problem, c.seed): c for v in found.verdicts for c in v.cases}
    differ = []
    for verdict in stated.verdicts:
        for case in verdict.cases:
            here = own.get((verdict.device, case.name, case.problem, case.seed))
            if here is None or (here.correct, here.max_error) != (case.correct, case.max_error):
                ended = "was not judged here" if here is None else f"{_ended(here)} here"
                differ.append(f"{verdict.device}: {case.name} on {case.problem} {_ended(case)} by the record, {ended}")
    return differ


def _ended(case: CaseResult) -> str:
    error = "without a result" if case.max_error is None else f"with an error of {case.max_error:.3g}"
    return f"{'passed' if case.correct else 'failed'} {error}"
