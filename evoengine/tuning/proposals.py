"""Judge proposed texts of a kernel, and record each in the ledger with its parent.

Only device code is taken from a proposal. Grid, block, shared memory, shapes, reference and the gate's cases are those
of its parent; seeds are drawn here. Compiler and emulator handle the text in a jail (evoengine.sandbox.jail).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, Self

from typing_extensions import TypedDict

from evoengine.errors import EvoengineError, UsageError
from evoengine.ledger.store import Ledger
from evoengine.records import PROPOSAL, Candidate, CaseResult, Config, Device, Outcome, Profile, Rejection, Source
from evoengine.sandbox.jail import MARK, require_jail
from evoengine.sandbox.untrusted import require_text
from evoengine.sandbox.worker_process import COMPILER_LIMITS
from evoengine.sandbox.workers import WorkerPool
from evoengine.search.evaluators import CpuEvaluator, end_of
from evoengine.search.pipeline import Compiled, Pipeline, Rendered
from evoengine.search.targets import spaces_of, target_of
from evoengine.space.space import SearchSpace
from evoengine.stages.profile import profile_without_gpu
from evoengine.stages.render import MOST_BYTES, render
from evoengine.stages.tasks import Evaluation
from evoengine.text import command_line
from evoengine.tuning.boards import custom_definition
from evoengine.tuning.setup import Echo, begin_build, drawn_seed, require_compilers, silent
from evoengine.workloads.base import Target
from evoengine.workloads.triton_kernel import is_triton

SAMPLER = "proposer"
"""of the run"""


def require_proposable(text: object) -> str:
    """Return the text of a proposal. Raises UsageError if it is not text, or cannot be stored."""
    if not isinstance(text, str) or not text.strip():
        raise UsageError("a proposal must hold the kernel's text under the name text")
    if len(text.encode(errors="replace")) > MOST_BYTES:
        raise UsageError(f"the proposed text exceeds {MOST_BYTES >> 20} MiB, the limit of a kernel")
    try:
        require_text(text)
    except ValueError as error:
        raise UsageError(f"the proposed text cannot be stored: {error}") from None
    return text


class Kernel(NamedTuple):
    """Target and space of proposals; `identity` is that of a user's own kernel."""

    target: Target
    space: SearchSpace
    identity: str | None


def kernel_of(ledger: Ledger, trial: Candidate) -> Kernel:
    """Return the kernel of a trial's run. Raises UsageError if its workload is unknown."""
    target = target_of(ledger, trial)
    return Kernel(target, spaces_of(ledger, [trial], target)[trial.run], ledger.run(trial.run).kernel)


class Proposals:
    """A run in the ledger whose candidates are proposed one at a time. Close it, or use it as a context manager."""

    def __init__(self, ledger: Ledger, kernel: Kernel, echo: Echo = silent) -> None:
        """Begin the run. Raises MachineError if this machine has no jail or no compiler."""
        target, space, identity = kernel
        require_jail()
        require_compilers(target.gpu, emulated=True)
        self._ledger, self._target = ledger, target
        build = begin_build(True, echo)
        self._judge = CpuEvaluator(target, build)
        self._pipeline = Pipeline(target, space, Path(), self._judge, timed=False)
        self._workers = WorkerPool(1, COMPILER_LIMITS)
        self._known: dict[str, int] = {}
        """sha256 of a source → the trial that has it"""
        self.run = ledger.start_run(
            gpu=target.gpu.key,
            problem=str(target.problem),
            device=Device("emulator"),
            space=space,
            sampler=SAMPLER,
            seed=0,
            command=command_line(),
            definition=target.workload.definition_text,
            gpu_definition=custom_definition(target.gpu),
            kernel=identity,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """End the run; its status names the error, if there was one."""
        self._workers.close()
        self._judge.close()
        if kind is None:
            self._ledger.finish_run(self.run, "all proposals judged")
            return
        with suppress(EvoengineError):  # the ledger itself may have failed
            self._ledger.finish_run(self.run, f"stopped: {error}" if issubclass(kind, Exception) else "interrupted")

    def start(self, config: Config, templates: Path) -> Candidate:
        """Judge the kernel's own text for a configuration; proposals may descend from it."""
        source = render(self._target, self._pipeline.space, config, templates)
        if is_triton(source.text):
            raise UsageError("proposals are CUDA text, but this kernel is a Triton kernel")
        return self._evaluate(config, source, (), "start")

    def propose(self, parent: Candidate, text: str) -> Candidate:
        """Judge a text in place of its parent's. Raises UsageError as `require_proposable` does."""
        assert parent.source is not None  # it was rendered
        text = MARK + require_proposable(text).removeprefix(MARK)
        return self._evaluate(parent.config, replace(parent.source, text=text), (parent.trial,), PROPOSAL)

    def profile(self, candidate: Candidate) -> Profile | None:
        """Return the model's profile of a correct candidate; None if its process dies."""
        found = self._workers.submit(
            profile_without_gpu, self._target, candidate.contender, on_crash=Outcome.CRASHED, returns=Profile
        ).result()
        return found if isinstance(found, Profile) else None

    def _evaluate(self, config: Config, source: Source, parents: tuple[int, ...], operator: str) -> Candidate:
        problem, gpu = str(self._target.problem), self._target.gpu.key
        trial = self._ledger.add_candidate(self.run, problem, gpu, config, parents, operator, source)
        first = self._known.setdefault(source.sha256, trial)
        if first != trial:
            self._ledger.finish(trial, Outcome.DUPLICATE, f"has the same text as trial {first}", None, None)
        else:
            self._judge_source(Rendered(trial, config, source))
        return self._ledger.candidate(trial, with_cubin=True)

    def _judge_source(self, rendered: Rendered) -> None:
        compiled = self._pipeline.compile(rendered, self._workers)
        if isinstance(compiled, Rejection):
            self._finish(rendered, compiled)
            return
        self._ledger.record_binary(rendered.trial, compiled.source, compiled.binary)
        rejection = self._pipeline.screen_binary(compiled)
        judged = rejection or self._pipeline.evaluate(compiled.contender, drawn_seed(), self._workers).result()
        self._finish(compiled, judged)

    def _finish(self, reached: Rendered, result: Evaluation | Rejection) -> None:
        end = end_of(result)
        occupancy = reached.occupancy if isinstance(reached, Compiled) else None
        self._ledger.finish(
            reached.trial, end.outcome, end.reason, occupancy, end.device, end.verdicts, end.figure, end.evidence
        )


def descendant(ledger: Ledger, trial: int) -> Candidate:
    """Return the trial as the parent of proposals. Raises UsageError if it has no CUDA text."""
    parent = ledger.candidate(trial)
    if parent.source is None or not parent.source.text or is_triton(parent.source.text):
        raise UsageError(f"trial {trial} has no CUDA text that a proposal could replace")
    return parent


# What a proposer is told of a candidate. It must not reveal the gate's seeds.


class Counterexample(TypedDict):
    """The first case of the gate that a candidate failed; errors are absolute, null where there was no result."""

    case: str
    problem: str
    max_error: float | None
    allowed: float | None
    reason: str | None


class GivenLaunch(TypedDict):
    """Blocks of the grid, threads of a block, and bytes of dynamic shared memory, which a proposal cannot change."""

    grid: Sequence[int]
    block: Sequence[int]
    shared_bytes: int


class JudgedText(TypedDict):
    """A text and its verdict. A field is null if the text did not reach that stage."""

    trial: int
    parents: Sequence[int]
    text: str
    entry: str
    launch: GivenLaunch
    problem: str
    gpu: str
    config: Config
    outcome: Outcome | None
    reason: str | None
    counterexample: Counterexample | None
    predicted_us: float | None
    registers: int | None
    spill_bytes: int | None


def judged_json(candidate: Candidate) -> JudgedText:
    source, binary, figure = candidate.source, candidate.binary, candidate.measurement
    assert source is not None  # it was rendered
    launch = source.launch
    failed = next((c for v in candidate.verdicts for c in v.cases if not c.correct), None)
    return {
        "trial": candidate.trial,
        "parents": candidate.parents,
        "text": source.text.removeprefix(MARK),
        "entry": source.entry,
        "launch": {"grid": launch.grid, "block": launch.block, "shared_bytes": launch.shared_bytes},
        "problem": candidate.problem,
        "gpu": candidate.gpu,
        "config": dict(candidate.config),
        "outcome": candidate.outcome,
        "reason": candidate.reason,
        "counterexample": _counterexample(failed) if failed else None,
        "predicted_us": figure.compared_us if figure else None,
        "registers": binary.registers if binary else None,
        "spill_bytes": binary.spill_bytes if binary else None,
    }


def _counterexample(case: CaseResult) -> Counterexample:
    return {
        "case": case.name,
        "problem": case.problem,
        "max_error": case.max_error,
        "allowed": case.allowed,
        "reason": case.reason,
    }
