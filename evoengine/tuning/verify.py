"""Gate kernels outside any search: one configuration, each configuration of a Triton kernel, an exported kernel.

A configuration is rendered, compiled and gated. A Triton kernel is gated in a worker process, which may die. An export
is judged again by its verification record, without a ledger, a GPU or a network.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from evoengine.devices.driver import resolve_gpu
from evoengine.errors import MachineError, UsageError
from evoengine.gpu import AUTO, Gpu, find_gpu, known_gpus
from evoengine.gpu_file import stored_fields
from evoengine.ledger.rows import last_verdicts
from evoengine.ledger.store import Ledger, open_ledger
from evoengine.publish.record import Record, read_record
from evoengine.records import EMULATOR, EXECUTOR, PROPOSAL, Candidate, CaseResult, Config, Judged, Outcome, Rejection
from evoengine.sandbox.worker_process import COMPILER_LIMITS
from evoengine.sandbox.workers import WorkerPool
from evoengine.sass.launch import require_arch_of
from evoengine.search.compilers import Renderer, with_machine_code
from evoengine.search.evaluators import Evaluator, end_of, make_evaluator
from evoengine.search.finishing import judge_once
from evoengine.search.first_build import build_judges
from evoengine.search.pipeline import Pipeline, Proposed
from evoengine.search.reference import require_reference, with_functions
from evoengine.search.targets import restored_workload
from evoengine.space.space import SearchSpace, space_from_text
from evoengine.stages.render import Fill
from evoengine.tuning.boards import choose_gpu
from evoengine.tuning.proposals import kernel_of
from evoengine.tuning.setup import (
    Echo,
    begin_build,
    checked,
    choose_device,
    drawn_seed,
    lock_gpu,
    make_target,
    prepare_space,
    require_compilers,
    require_seed,
    silent,
)
from evoengine.virtual import require_triton
from evoengine.workloads.base import Host, Target
from evoengine.workloads.triton_kernel import is_triton

if TYPE_CHECKING:
    from evoengine.virtual.gate import ConfigVerdict
    from evoengine.virtual.verify import Session


@dataclass(frozen=True, slots=True, repr=False)
class Verified:
    candidate: Candidate
    seed: int
    """repeats the verdict"""
    on_cpu: Judged | None = None
    """verdicts of the CPU judges, if they were requested and there is a binary"""

    def __repr__(self) -> str:
        c, ended = self.candidate, "correct" if self.correct else self.why_not
        time = f", {c.measurement.kind} {c.measurement.compared_us:.4g} µs" if c.measurement else ""
        return f"Verified({ended}{time}, seed {self.seed}: {c.problem} on {c.gpu}, {dict(c.config)})"

    @property
    def correct(self) -> bool:
        return bool(self.candidate.correct)

    @property
    def why_not(self) -> str:
        """Return the outcome of a candidate that is not correct, with the reason."""
        c = self.candidate
        if c.outcome is None and self.on_cpu and (wrong := self.on_cpu.wrong):
            return f"{wrong.outcome}: {self.on_cpu.why_wrong}"
        return f"{c.outcome}: {c.reason}"


def verify(
    config: Config | int,
    problem: str | None = None,
    gpu: str = AUTO,
    *,
    db: str | os.PathLike[str] | None = None,
    gpu_file: Path | str | None = None,
    kernel: Path | str | None = None,
    device: str = "auto",
    space: Path | str | None = None,
    templates: Path | str | None = None,
    binary: bool = False,
    seed: int | None = None,
    echo: Echo = silent,
    on_stage: Echo = silent,
) -> Verified:
    """Render, compile and gate a configuration on a GPU, or by both judges on the CPU; with `binary` by all three.

    `config` may be the number of a trial in the ledger `db`, which stands for its configuration and supplies problem
    and GPU unless they are given. `on_stage` receives the current stage. Raises UsageError if the configuration is not
    in the space.
    """
    given = checked(verify, {name: value for name, value in locals().items() if name not in ("echo", "on_stage")})
    place = given.pop("db")
    if isinstance(config, int):
        with open_ledger(place, create=False) as ledger:
            found = ledger.candidate(config)
            if is_judged_as_stored(found):
                return _as_stored(ledger, found, seed, on_stage)
        given |= {"config": found.config, "problem": problem or found.problem}
        given["gpu"] = found.gpu if gpu == AUTO and not gpu_file else gpu
    return _of_config(**given, echo=echo, on_stage=on_stage)


def is_judged_as_stored(found: Candidate) -> bool:
    """Return whether a trial's stored text is judged: a proposal or a Triton kernel cannot be rendered again."""
    return found.operator == PROPOSAL or (found.source is not None and is_triton(found.source.text))


def _as_stored(ledger: Ledger, found: Candidate, seed: int | None, on_stage: Echo) -> Verified:
    """Judge the stored text and binary."""
    require_seed(seed)
    known = with_machine_code(ledger, found.trial)
    if isinstance(known, Rejection):
        raise MachineError(f"trial {found.trial} cannot be judged here: {known.reason}")
    kernel, seed = kernel_of(ledger, found), drawn_seed(seed)
    require_compilers(kernel.target.gpu, emulated=True)
    on_stage("executing it")
    judged = judge_once(kernel.target, kernel.space, known.contender, seed)
    if isinstance(judged, Rejection):
        raise MachineError(f"trial {found.trial} cannot be judged here: {judged.reason}")
    return Verified(replace(known, outcome=None, **last_verdicts(judged.verdicts)), seed, judged)


def _of_config(
    config: Config,
    problem: str | None,
    gpu: str,
    gpu_file: Path | None,
    kernel: Path | None,
    device: str,
    space: Path | None,
    templates: Path | None,
    binary: bool,
    seed: int | None,
    echo: Echo,
    on_stage: Echo,
) -> Verified:
    require_seed(seed)
    choice = choose_gpu(gpu, gpu_file)
    target = make_target(problem, choice.gpu, kernel)
    timing = choose_device(device, target.gpu, echo)
    if timing:
        target = replace(target, gpu=resolve_gpu(timing, target.gpu))
    seed = drawn_seed(seed)
    with closing(Renderer()) as fill:
        on_stage("reading the space")
        bound, folder = prepare_space(space, templates, target, timing is None, fill)
        config = _completed(bound, config)
        require_compilers(target.gpu, emulated=timing is None)
        on_stage("running the reference")
        require_reference(target, echo)
        if choice.why:
            echo(choice.why)
        on_stage("compiling and gating")
        with lock_gpu(timing, echo):
            build = None if timing else begin_build(True, echo)
            with closing(make_evaluator(target, timing, seed, build=build)) as judge:
                candidate = evaluate_config(target, bound, config, folder, judge, seed, fill)
    if not candidate.verdicts:
        return Verified(candidate, seed)
    if timing is None:
        verdicts = tuple(v for v in (candidate.binary_verdict, candidate.verdict) if v is not None)
        return Verified(candidate, seed, Judged(verdicts))
    if not binary:
        return Verified(candidate, seed)
    on_stage("executing the machine code and the text")
    found = judge_once(target, bound, candidate.contender, seed)
    if isinstance(found, Rejection):
        raise MachineError(f"the candidate cannot be judged on the CPU: {found.reason}")
    by_binary = next((v for v in found.verdicts if v.device == EXECUTOR), None)
    return Verified(replace(candidate, binary_verdict=by_binary), seed, found)


def _completed(space: SearchSpace, config: Config) -> Config:
    """Return a configuration with the knobs that follow from others. Raises UsageError if it is not in the space."""
    families = space.knobs[0].values
    if "family" not in config and len(families) == 1:
        config = {"family": families[0], **config}
    if config.get("family") in families:
        config = {**config, **space.completed(config)}
    if why := space.why_invalid(config):
        raise UsageError(f"the configuration is not in the space {space.name}: {why}")
    return config


def evaluate_config(
    target: Target, space: SearchSpace, config: Config, templates: Path, judge: Evaluator, seed: int, fill: Fill
) -> Candidate:
    """Render, compile, screen and judge a configuration, in processes that may die."""
    # `timed`: a spill is slow, not wrong; only a binary that cannot be launched or correct gets no verdict
    pipeline = Pipeline(target, space, templates, judge, timed=True, fill=fill)
    proposed = Proposed(0, config)
    rendered = pipeline.render(proposed)
    if isinstance(rendered, Rejection):
        return pipeline.ended(proposed, end_of(rendered))
    with closing(WorkerPool(1, COMPILER_LIMITS)) as workers:
        compiled = pipeline.compile(rendered, workers)
        if isinstance(compiled, Rejection):
            return pipeline.ended(rendered, end_of(compiled))
        if rejection := pipeline.screen_binary(compiled):
            return pipeline.ended(compiled, end_of(rejection))
        judge.baselines()
        result = pipeline.evaluate(compiled.contender, seed, workers).result()
    candidate = pipeline.ended(compiled, end_of(result))
    if isinstance(result, Rejection):
        return candidate
    wrong = Judged(result.verdicts).wrong
    return replace(candidate, outcome=wrong.outcome if wrong else None)


SECONDS = 3600.0
"""time limit of one configuration"""


def verify_triton(
    host: Host, gpu: Gpu, seed: int, exact: bool = False, on_stage: Callable[[str], None] = lambda stage: None
) -> list[ConfigVerdict]:
    """Return a verdict for each configuration of the autotuner's list, in its order.

    A configuration whose process dies or exceeds its time is wrong; the others are still gated. Raises UsageError as
    `Session` does, and for a GPU whose machine code cannot be executed.
    """
    from evoengine.virtual.gate import Attempt, ConfigVerdict

    require_triton()
    require_arch_of(gpu.capability)
    host = with_functions(host)
    on_stage("building the executor")
    build_judges(emulated=False)
    verdicts = []
    with closing(WorkerPool(1, replace(COMPILER_LIMITS, seconds=SECONDS, niceness=0, warm_up=_load))) as pool:
        on_stage("executing the file")
        configs = pool.submit(_configs, host, gpu, seed, on_crash=Outcome.CRASHED, returns=tuple).result()
        if isinstance(configs, Rejection):
            raise UsageError(f"{host.file} cannot be executed: {configs.reason}")
        first = 0  # with which the others are compared
        for number, config in enumerate(configs):
            on_stage(f"gating configuration {number + 1} of {len(configs)}")
            found = pool.submit(
                _gate, host, gpu, seed, number, first, exact, on_crash=Outcome.CRASHED, returns=ConfigVerdict
            ).result()
            if isinstance(found, Rejection):
                first += first == number
                found = ConfigVerdict(config, [Attempt("", "in a process", found.reason, found.outcome)])
            verdicts.append(found)
    return verdicts


def _load() -> None:
    import_module("evoengine.virtual.verify")


_sessions: dict[tuple[Host, Gpu, int], Session] = {}
"""cache of a worker process"""


def _configs(host: Host, gpu: Gpu, seed: int) -> tuple[str, ...]:
    return _session(host, gpu, seed).configs


def _gate(host: Host, gpu: Gpu, seed: int, number: int, first: int, exact: bool) -> ConfigVerdict:
    """Gate one configuration; a new process gates the `first` before, with which it is compared."""
    if (host, gpu, seed) not in _sessions and number != first:
        _session(host, gpu, seed).gate(first, exact)
    return _session(host, gpu, seed).gate(number, exact)


def _session(host: Host, gpu: Gpu, seed: int) -> Session:
    from evoengine.virtual.verify import Session

    if (host, gpu, seed) not in _sessions:
        _sessions[host, gpu, seed] = Session(host, gpu, seed)
    return _sessions[host, gpu, seed]


@dataclass(frozen=True, slots=True, repr=False)
class Attested(Verified):
    """The verdicts of this machine, and how they differ from the record's."""

    differences: tuple[str, ...] = ()
    """cases with another result than in the record"""


def verify_record(
    record: Path | str | os.PathLike[str],
    *,
    key: Path | str | None = None,
    echo: Echo = silent,
    on_stage: Echo = silent,
) -> Attested:
    """Judge the kernel of a verification record by both judges, on the record's cases with the record's seed.

    With `key`, a public key in PEM, the record must be signed by it. Raises UsageError if it is not a record
    or not signed by the key, MachineError if no judge can run here.
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
    """Return the problem, workload and GPU of a record. Raises UsageError if they are unknown."""
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
                ended = "was not judged here" if here is None else f"{_said(here)} here"
                differ.append(f"{verdict.device}: {case.name} on {case.problem} {_said(case)} by the record, {ended}")
    return differ


def _said(case: CaseResult) -> str:
    error = "without a result" if case.max_error is None else f"with an error of {case.max_error:.3g}"
    return f"{'passed' if case.correct else 'failed'} {error}"
