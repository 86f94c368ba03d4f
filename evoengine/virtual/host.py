"""What worker processes do with a user's Triton kernel in a search: examine, compile, judge and predict it.

A candidate is the file's text with a configuration. It is compiled and predicted by calling the user's function until
it launches the kernel, and judged by the gate of `evoengine verify --triton`.
"""

from __future__ import annotations

import ast
import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
import triton
from triton.runtime.autotuner import Config

from evoengine.devices.base import KernelFailure
from evoengine.errors import EvoengineError, UsageError
from evoengine.gpu import Gpu
from evoengine.records import (
    EMULATOR,
    EXECUTOR,
    GATE_VERSION,
    Binary,
    CaseResult,
    CompiledCandidate,
    Judged,
    Launch,
    Outcome,
    Plan,
    Plans,
    Source,
    Verdict,
)
from evoengine.sass.chip import Clock, find_chip
from evoengine.sass.launch import Geometry, prepare, require_arch_of
from evoengine.sass.listing import disassemble, instruction_mix
from evoengine.sass.predict import Prediction, Unpredictable, predict
from evoengine.stages.verify import CannotJudge
from evoengine.virtual.arguments import Arguments
from evoengine.virtual.device import LoadedKernel, VirtualGpu, VirtualGpuError
from evoengine.virtual.gate import MOST_DRAWN, Attempt, ConfigVerdict, GatingGpu, TooLarge
from evoengine.virtual.triton_driver import installed
from evoengine.virtual.triton_file import REFUSALS, Program, said, why_refused
from evoengine.virtual.verify import run_case, uninitialized_as_nan
from evoengine.workloads.base import Host
from evoengine.workloads.triton_kernel import (
    CLASSES,
    AutotuneEntry,
    Examined,
    Served,
    Stated,
    read_last_line,
    sizes_text,
    with_text,
)

LONGEST_ATTEMPT = 12.0
"""limit of the estimated seconds of one execution in a search; a candidate's judge may take 180 s, also on a busy
machine"""
SMALLEST_HALVED = 16
NO_TEXT = "its text was not executed: it is Python, and the emulator reads CUDA"


class Refused(Exception):
    """A configuration that Triton or the function refuses; the message states why."""


class _Reached(BaseException):
    """Ends the function when the kernel is launched. A BaseException, which no user's handler for Exception stops."""


@dataclass(frozen=True, slots=True)
class Reached:
    """A launch of the kernel, compiled and with its arguments, that was not executed."""

    loaded: LoadedKernel
    geometry: Geometry
    arguments: Arguments


class _Reaching(VirtualGpu):
    """A virtual GPU on which a program runs until it launches the kernel; other kernels are not executed."""

    def __init__(self, gpu: Gpu, program: Program) -> None:
        super().__init__(gpu)
        self._function = program.kernel.function
        self.reached: Reached | None = None

    def launch(self, loaded: LoadedKernel, geometry: Geometry, arguments: Arguments, options: str = "") -> None:
        if loaded.function is self._function:
            self.reached = Reached(loaded, geometry, arguments)
            raise _Reached


def reach(program: Program, sizes: Mapping[str, int], config: Config | None, gpu: Gpu) -> Reached:
    """Call the function until it launches the kernel, only with this configuration unless it is None.

    Raises Refused.
    """
    device = _Reaching(gpu, program)
    call = f"{program.host.call}({', '.join(f'{name}={size}' for name, size in sizes.items())})"
    alone = program.kernel.only(config) if config else nullcontext()
    with installed(device), alone, uninitialized_as_nan():
        torch.manual_seed(0)
        try:
            program.function(**sizes)
        except _Reached:
            pass
        except REFUSALS as error:
            raise Refused(why_refused(error)) from None
        except Exception as error:
            raise Refused(f"{call} raises {said(error, program.path)}") from None
    if device.reached is None:
        raise Refused(f"{call} launches no kernel {program.kernel.name}")
    return device.reached


# ── before a search ─────────────────────────────────────────────────────────────────────────────────────────────────


def examine(host: Host, gpu: Gpu) -> Examined:
    """Execute the file. Raises UsageError if it has no such kernel, functions or list of configurations."""
    require_arch_of(gpu.capability)
    program = Program(host, gpu)
    return Examined(program.sizes, program.kernel.settings)


NO_REFERENCE = "without --reference nothing says what is right: hazards, races, bad accesses and NaN are looked for"


def check(host: Host, sizes: Mapping[str, int], gpu: Gpu) -> tuple[str, ...]:
    """Call the function and the reference as the gate will, and return remarks for the user.

    Raises UsageError if one of them raises for the first configuration of the list.
    """
    program = Program(host, gpu)
    try:
        reached = reach(program, sizes, program.kernel.config_of(program.kernel.settings[0]), gpu)
    except Refused as refusal:
        raise UsageError(str(refusal)) from None
    gating = GatingGpu(gpu, program, 0)
    gating.require_reference(reached.arguments)
    return () if host.reference else (NO_REFERENCE,)


# ── a candidate ─────────────────────────────────────────────────────────────────────────────────────────────────────


def compiler_version() -> str:
    return f"triton {triton.__version__}"


def compile_text(source: Source, arch: str) -> Binary:
    """Return Triton's binary of a candidate's text, with the function's launch. Raises Refused."""
    start = time.perf_counter()
    stated = read_last_line(source.text)
    reached = _reach(stated)
    kernel, geometry = reached.loaded.kernel, reached.geometry
    listing = disassemble(reached.loaded.cubin)
    threads = math.prod(geometry.threads)
    return Binary(
        cubin=reached.loaded.cubin,
        arch=arch,
        options=f"-arch={arch}",
        compiler=compiler_version(),
        registers=kernel.registers,
        spill_bytes=kernel.local_bytes,
        stack_bytes=kernel.local_bytes,
        shared_bytes=kernel.shared_bytes,
        warnings=(),
        mix=instruction_mix(listing),
        listing=listing,
        compile_ms=(time.perf_counter() - start) * 1e3,
        launch=Launch(geometry.grid, threads, geometry.shared_bytes),
    )


def _reach(stated: Stated) -> Reached:
    try:
        program = Program(stated.host, stated.gpu)
        return reach(program, stated.sizes, program.kernel.config_of(stated.config), stated.gpu)
    except UsageError as error:
        raise Refused(str(error)) from None


def predict_launch(contender: CompiledCandidate, clock: Clock, cold: bool) -> Prediction:
    """Predict the first launch of the kernel with the problem's sizes. Raises Unpredictable."""
    stated = read_last_line(contender.source.text)
    try:
        reached = _reach(stated)
        if reached.loaded.cubin != contender.binary.cubin:
            raise Unpredictable(f"Triton makes other machine code of it than before: {compiler_version()}")
        arguments = reached.arguments
        launch = prepare(reached.loaded.kernel, reached.geometry, arguments.parameters, 0, mapped=arguments.for_model())
        return predict(reached.loaded.program, launch, find_chip(stated.gpu.key), clock=clock, cold=cold)
    except (Refused, EvoengineError, VirtualGpuError, KernelFailure) as error:
        raise Unpredictable(str(error)) from None


def autotune_entry(text: str, times_ms: Sequence[float]) -> AutotuneEntry:
    """Return the entry of the autotuner's cache that makes the user's file use this candidate.

    The autotuner itself writes it: it is given the candidate's three times in place of its benchmarks and launches
    nothing. Raises UsageError if it keeps no cache.
    """
    stated = read_last_line(text)
    program = Program(stated.host, stated.gpu)
    tuner = program.kernel.tuner
    if len(tuner.configs) < 2 or any(config.pre_hook for config in tuner.configs):
        raise UsageError("Triton's autotuner keeps no cache for a single configuration, nor for one with a pre_hook")
    winner = program.kernel.config_of(stated.config)

    def instead(tuning_key: tuple[object, ...], configs: Sequence[Config], benchmark: object) -> bool:
        def known() -> None:
            tuner.configs_timings = {winner: list(times_ms)}
            tuner.cache[tuning_key] = winner

        return bool(type(tuner).check_disk_cache(tuner, tuning_key, configs, known))

    tuner.cache_results, tuner.check_disk_cache = True, instead
    with tempfile.TemporaryDirectory() as folder, triton.knobs.cache.scope():
        triton.knobs.cache.dir = folder
        try:
            reach(program, stated.sizes, None, stated.gpu)
        except Refused as refusal:
            raise UsageError(str(refusal)) from None
        for file in Path(folder).glob("*/*.autotune.json"):
            return AutotuneEntry(file.parent.name, file.name, file.read_text("utf-8"))
    raise UsageError("Triton's autotuner wrote no cache")


class HostJudge:
    """The executor as the judge of a candidate that its own program launches.

    It has the methods of `Judges`; the emulator abstains.
    """

    def __init__(self, contender: CompiledCandidate, plans: Plans, seed: int) -> None:
        self._stated, self._plans, self._seed = read_last_line(contender.source.text), plans, seed
        self._program: Program | None = None

    def judge_short(self) -> Judged:
        """Judge the small sizes, or the problem's own if the function accepts no small ones."""
        found = self._verdict(self._plans.short)
        if found.correct and not found.cases:
            return self._ended(self._verdict(self._plans.long))
        whole = not found.correct or not self._plans.long
        return self._ended(found) if whole else Judged((replace(found, whole=False),))

    def judge_rest(self, known: Sequence[Verdict]) -> Judged:
        """Judge the problem's own sizes too."""
        short = next((v for v in reversed(known) if v.device == EXECUTOR), None)
        if short is None:
            (short, *_) = self.judge_short().verdicts
        if short.whole:
            return self._ended(short)
        more = self._verdict(self._plans.long)
        cases = short.cases + more.cases
        return self._ended(replace(more, cases=cases, wall_ms=short.wall_ms + more.wall_ms))

    def judge_whole(self) -> Judged:
        return self.judge_rest(())

    def _ended(self, verdict: Verdict) -> Judged:
        if not verdict.correct:
            return Judged((verdict,))
        return Judged((verdict, Verdict(EMULATOR, None, NO_TEXT, (), 0.0, gate_version=GATE_VERSION)))

    def _verdict(self, plan: Plan) -> Verdict:
        """Call the function with the sizes of each case until a launch is wrong."""
        start = time.perf_counter()
        stated = self._stated
        program = self._program = self._program or Program(stated.host, stated.gpu)
        gating = GatingGpu(stated.gpu, program, self._seed)
        gating.longest, gating.most = LONGEST_ATTEMPT, MOST_DRAWN
        config = program.kernel.config_of(stated.config)
        results: list[CaseResult] = []
        with installed(gating), program.kernel.only(config):
            for number, (case, _) in enumerate(plan):
                gating.verdict = ConfigVerdict("")
                part = _run_affordably(gating, program, case, number)
                results += [self._result(case, attempt, part) for attempt in gating.verdict.attempts]
                if gating.verdict.wrong:
                    break
        wrong = gating.verdict.wrong
        reason = f"{wrong.sizes or 'no sizes'}, {wrong.draw}: {wrong.reason}" if wrong else None
        ms = (time.perf_counter() - start) * 1e3
        return Verdict(
            EXECUTOR, wrong.outcome if wrong else None, reason, tuple(results), ms, gate_version=GATE_VERSION
        )

    def _result(self, case: Any, attempt: Attempt, part: str | None) -> CaseResult:
        bound = attempt.bound
        return CaseResult(
            name=attempt.draw,
            problem=str(case.problem),
            seed=self._seed,
            correct=attempt.reason is None,
            max_error=bound.error if bound else None,
            mean_error=None,
            allowed=bound.allowed if bound else None,
            reason=attempt.reason,
            part=part,
        )


def _run_affordably(gating: GatingGpu, program: Program, case: Any, number: int) -> str | None:
    """Gate a case, with smaller sizes if its own would take too long; return a remark on them.

    The largest size is halved until the case is affordable. Raises CannotJudge if it never is.
    """
    own: dict[str, int] = dict(case.problem.sizes)
    sizes, remark = own, None
    while True:
        try:
            run_case(gating, program, sizes, number)
        except UsageError as error:
            gating.verdict.attempts.append(Attempt(gating.sizes, case.name, str(error), Outcome.INCORRECT))
        except TooLarge as error:
            largest = max(sizes, key=lambda name: sizes[name], default=None)
            if largest is None or sizes[largest] <= SMALLEST_HALVED:
                raise CannotJudge(f"its machine code was not executed: executing it would {error}") from None
            sizes = {**sizes, largest: sizes[largest] // 2}
            remark = remark or f"its own sizes would {error}"
            continue
        return remark and f"{sizes_text(sizes)}, as {remark}"


# ── files of vLLM and SGLang ────────────────────────────────────────────────────────────────────────────────────────


# Such a file is parsed and not executed, because it imports its whole framework. It stays in its place, and the
# kernel's text is stored in the ledger as that of any other kernel of a user.

FRAMEWORKS = ("vllm", "sglang")


def with_functions(host: Host) -> Host:
    """Return a file with only the kernel, an autotuner around it, `call` and `reference`.

    Raises UsageError if the file is not Python, has no such kernel, or belongs to no known framework.
    """
    try:
        tree = ast.parse(host.text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UsageError(f"{host.file} is no text of Python: {error}") from None
    kernel = _extracted(host, tree)
    framework = _framework(host, tree)
    served = Served(framework, host.kernel, host.call)
    functions = files(__package__).joinpath("served.py").read_text("utf-8").replace(FUTURE, "")
    arguments = f"{host.kernel}, {framework!r}, {host.call!r}, {MOST_DRAWN}"
    return with_text(
        host,
        served,
        f"{kernel}\n\n{functions}\n\n_served = {CLASSES[host.kernel]}({arguments})\n"
        f"{host.kernel}, call, reference = _served.tuned, _served.call, _served.reference\n",
    )


FUTURE = "from __future__ import annotations\n"
IMPORTS = "import triton\nimport triton.language as tl\n"


def _extracted(host: Host, tree: ast.Module) -> str:
    """Return the text of the kernel and of the names that it uses in its own file."""
    defined = {name: node for node in tree.body for name in _names_of(node)}
    if not isinstance(defined.get(host.kernel), ast.FunctionDef):
        raise UsageError(f"{host.file} has no kernel {host.kernel}")
    wanted, open_ = set[str](), [host.kernel]
    while open_:
        name = open_.pop()
        if name in wanted or name not in defined:
            continue
        wanted.add(name)
        open_ += [node.id for node in ast.walk(defined[name]) if isinstance(node, ast.Name)]
    nodes = {id(defined[name]): defined[name] for name in wanted}
    lines = host.text.splitlines()
    texts = ["\n".join(lines[_first_line(node) - 1 : node.end_lineno]) for node in tree.body if id(node) in nodes]
    return IMPORTS + "\n\n" + "\n\n\n".join(texts)


def _names_of(node: ast.stmt) -> list[str]:
    """Return the names that a function or a constant at the top level of a file defines."""
    if isinstance(node, ast.FunctionDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _first_line(node: ast.stmt) -> int:
    decorators = node.decorator_list if isinstance(node, ast.FunctionDef) else []
    return min([node.lineno, *(each.lineno for each in decorators)])


def _framework(host: Host, tree: ast.Module) -> str:
    """Return the framework that the file's imports name."""
    for node in ast.walk(tree):
        names = [node.module] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for name in names:
            if name and name.partition(".")[0] in FRAMEWORKS:
                return name.partition(".")[0]
    raise UsageError(f"{host.file} imports neither vllm nor sglang: nothing says whose {host.kernel} it is")
