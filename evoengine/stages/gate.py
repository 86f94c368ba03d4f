"""The gate without a GPU: two judges run the same cases on a candidate.

The executor runs its machine code, with the registers, addresses and descriptors that the compiler chose; the emulator
runs its source text. Both name source lines. The executor comes first, for every candidate of an architecture that it
can read. A candidate is judged in two steps: the short cases by one judge, and, where it may rank, the rest by both:
long cases, and blocks of the problem itself. The blocks, and cases that one judge suffices for, are run as machine
code, which is the cheaper road, and by the emulator where the executor cannot judge. What is ranked near the top has
passed both judges; where one cannot judge, the other judges alone, and the verdict says so.
"""

from __future__ import annotations

import re
import resource
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from evoengine.cuda_emulator.build import build
from evoengine.cuda_emulator.declarations import blank_comments
from evoengine.cuda_emulator.run import run_blocks, run_rounds
from evoengine.devices.base import (
    VISIT,
    Executed,
    KernelCrashed,
    KernelFailure,
    KernelHung,
    Round,
    RunRounds,
    ScratchParameter,
)
from evoengine.devices.pool import BlockLaunch, BlockTrace, RunBlocks
from evoengine.errors import MachineError, UsageError
from evoengine.records import (
    EMULATOR,
    EXECUTOR,
    GATE_VERSION,
    CaseResult,
    CompiledCandidate,
    Judged,
    Launch,
    Plan,
    Plans,
    Source,
    Verdict,
)
from evoengine.sandbox.jail import needs_jail
from evoengine.sass import core, rounds
from evoengine.sass.cubin import read_kernel
from evoengine.sass.launch import require_arch
from evoengine.stages.compile import listing_of, name_source_lines
from evoengine.stages.toolchain import in_jail
from evoengine.stages.verify import (
    CannotJudge,
    CaseIdentity,
    compare,
    failed,
    joined,
    run_plan,
    share_of_allowed,
    verify,
    without_missing,
)
from evoengine.workloads.base import AnyWorkload, Grouped, NothingWritten, WrittenPart, WrongBlock
from evoengine.workloads.full_size import FullCase

if TYPE_CHECKING:
    from evoengine.virtual.host import HostJudge

LAUNCH_SECONDS = 120.0
"""limit of CPU time of an emulated launch, which takes milliseconds, or a minute for scalar gradients at 8,192 keys"""


@dataclass(frozen=True, slots=True)
class Judge:
    """A device without a GPU that runs a candidate's launches."""

    device: str
    run: RunRounds
    run_blocks: RunBlocks
    named: frozenset[int] = frozenset()
    """whole numbers in the candidate's text, which may be those of blocks that it treats otherwise"""


def executor(contender: CompiledCandidate) -> Judge:
    """Return the judge of a candidate's machine code.

    Raises CannotJudge where that cannot be read or has opcodes that the executor does not know, and where this machine
    has no disassembler or no C++ compiler.
    """
    source = contender.source
    executables = {}
    for entry, _ in source.launch.kernels(source.entry):
        try:
            kernel = read_kernel(contender.binary.cubin, entry)
            require_arch(kernel)
            program = core.Program(listing_of(contender.binary), entry)
        except (UsageError, MachineError) as error:
            raise CannotJudge(f"its machine code was not executed: {error}") from error
        if program.unknown:
            named = ", ".join(f"{opcode} ({count}×)" for opcode, count in program.unknown.items())
            raise CannotJudge(f"its machine code was not executed: the executor does not know {named}")
        executables[entry] = rounds.Executable(kernel, program)

    def launch(calls: Sequence[Round], seed: int) -> Executed:
        with _naming_lines(contender):
            return rounds.run_rounds(executables, calls, seed)

    def launch_blocks(asked: BlockLaunch, seed: int) -> list[BlockTrace]:
        with _naming_lines(contender):
            return rounds.run_blocks(executables[asked.entry or source.entry], asked, seed)

    return Judge(EXECUTOR, launch, launch_blocks, numbers_in(source.text))


@contextmanager
def _naming_lines(contender: CompiledCandidate) -> Iterator[None]:
    """Name source lines in what a launch of the machine code fails with."""
    try:
        yield
    except KernelFailure as failure:
        raise type(failure)(name_source_lines(str(failure), contender.source, contender.binary)) from failure


def emulator(source: Source, arch: str) -> Judge:
    """Return the judge of a candidate's text, as it is compiled for `arch` (sm_90a).

    Raises CannotJudge where the emulator cannot build it.
    """
    try:
        executable = build(source, arch)
    except KernelFailure as failure:
        raise CannotJudge(f"its text was not executed: the emulator cannot build it: {failure}") from failure

    def launch(rounds: Sequence[Round], seed: int) -> Executed:
        return run_rounds(executable, rounds, seed, LAUNCH_SECONDS)

    def launch_blocks(asked: BlockLaunch, seed: int) -> list[BlockTrace]:
        return run_blocks(executable, asked.entry or source.entry, asked, seed, LAUNCH_SECONDS)

    return Judge(EMULATOR, launch, launch_blocks, numbers_in(source.text))


def judge_short(judge: Judge, workload: AnyWorkload, plans: Plans, seed: int) -> Verdict:
    """Judge the short cases. The verdict is whole where there are no others, or where one of them failed."""
    verdict = verify(workload, plans.short, judge.run, judge.device, seed)
    return replace(verdict, whole=not verdict.correct or not (plans.long or plans.full))


def judge_rest(judge: Judge, workload: AnyWorkload, plans: Plans, seed: int, short: Verdict) -> Verdict:
    """Judge the long cases and those at full size; the verdict has the short ones of `short` too."""
    if short.whole:
        return short
    more = verify(workload, plans.long, judge.run, judge.device, seed + 1)
    both = replace(
        more,
        cases=short.cases + more.cases,
        wall_ms=short.wall_ms + more.wall_ms,
        coverage=joined(short.coverage, more.coverage),
        whole=True,
    )
    return verify_blocks(both, workload, plans.full, judge.run_blocks, seed + 2, judge.named)


def judge_second(judge: Judge, workload: AnyWorkload, plans: Plans, seed: int, short: Verdict) -> Verdict:
    """Judge as `judge_rest` does what another judge has passed: without the cases that one judge suffices for.

    The cells that only those visit are none of this verdict's.
    """
    once = [(case, launch) for case, launch in plans.long if case.once]
    rest = Plans(plans.short, [(case, launch) for case, launch in plans.long if not case.once])
    found = judge_rest(judge, workload, rest, seed, short)
    elsewhere = {cell for case, launch in once for cell in workload.visited(case, launch, np.empty(0, VISIT))}
    return replace(found, coverage=without_missing(found.coverage, elsewhere))


def judge_whole(judge: Judge, workload: AnyWorkload, plans: Plans, seed: int) -> Verdict:
    return judge_rest(judge, workload, plans, seed, judge_short(judge, workload, plans, seed))


class Judges:
    """Both judges of one candidate, each prepared when it is first used."""

    def __init__(
        self, workload: AnyWorkload, contender: CompiledCandidate, plans: Plans, seed: int, failed: str | None = None
    ) -> None:
        """Create the judges of a candidate.

        `failed` states why the machine code must not be executed, for example because the executor ended the process
        before.
        """
        self._workload, self._contender, self._plans, self._seed = workload, contender, plans, seed
        self._failed = failed

    def judge_short(self) -> Judged:
        """Judge the short cases by the machine code, or by the text where that cannot be.

        Raises CannotJudge where neither can be.
        """
        found: list[Verdict] = []
        for device in (EXECUTOR, EMULATOR):
            try:
                found.append(self._short(device))
                break
            except CannotJudge as error:
                found.append(_abstention(device, error))
        return _judged(found)

    def judge_whole(self) -> Judged:
        """Judge every case by both judges, the machine code first, also those for which one judge suffices.

        Raises CannotJudge where neither can be judged.
        """
        found: list[Verdict] = []
        for device in (EXECUTOR, EMULATOR):
            found.append(self._to_the_end(device, None, first=True))
            if not found[-1].correct:
                break
        return _judged(found)

    def judge_rest(self, known: Sequence[Verdict]) -> Judged:
        """Judge to the end what earlier verdicts left open: the machine code first, then the text.

        What the machine code has passed is not put to the text again where one judge suffices. Raises CannotJudge where
        neither can be judged.
        """
        found: list[Verdict] = []
        for device in (EXECUTOR, EMULATOR):
            earlier = next((v for v in reversed(known) if v.device == device), None)
            first = all(v.abstained for v in found)
            found.append(earlier if earlier is not None and earlier.whole else self._to_the_end(device, earlier, first))
            if not found[-1].correct:
                break
        return _judged(found)

    def _to_the_end(self, device: str, earlier: Verdict | None, first: bool) -> Verdict:
        try:
            return self._rest(device, earlier, first)
        except CannotJudge as error:
            return _abstention(device, error)

    def _short(self, device: str) -> Verdict:
        if self._enters_jail(device):
            return self._rest(device, None, first=True)  # the process starts in more time than the cases take
        return judge_short(self._prepare(device), self._workload, self._plans, self._seed)

    def _rest(self, device: str, earlier: Verdict | None, first: bool) -> Verdict:
        if self._enters_jail(device):
            return in_jail(self._rest, device, earlier, first, returns=Verdict, raises=(CannotJudge,))
        judge = self._prepare(device)
        short = earlier or judge_short(judge, self._workload, self._plans, self._seed)
        rest = judge_rest if first else judge_second
        return rest(judge, self._workload, self._plans, self._seed, short)

    def _enters_jail(self, device: str) -> bool:
        """Return whether a proposal's machine code is judged; the emulator has a jail for its own process."""
        return device == EXECUTOR and not self._failed and needs_jail(self._contender.source.text)

    def _prepare(self, device: str) -> Judge:
        if device == EMULATOR:
            return emulator(self._contender.source, self._contender.binary.arch)
        if self._failed:
            raise CannotJudge(f"its machine code was not executed: {self._failed}")
        return executor(self._contender)


def judges_of(
    workload: AnyWorkload, contender: CompiledCandidate, plans: Plans, seed: int, failed: str | None = None
) -> Judges | HostJudge:
    """Return the judges of a candidate; of one that its own program launches the executor alone.

    Raises CannotJudge for the latter where the executor `failed` before.
    """
    if workload.host is None:
        return Judges(workload, contender, plans, seed, failed)
    if failed:
        raise CannotJudge(f"its machine code was not executed: {failed}")
    from evoengine.virtual.host import HostJudge

    return HostJudge(contender, plans, seed)


def _abstention(device: str, why: CannotJudge) -> Verdict:
    return Verdict(device, None, str(why), (), 0.0, gate_version=GATE_VERSION)


def _judged(verdicts: Sequence[Verdict]) -> Judged:
    if all(v.abstained for v in verdicts):
        raise CannotJudge("; ".join(str(v.reason) for v in verdicts))
    return Judged(tuple(verdicts))


# The gate at full size: blocks of the problem itself, over tensors of which only touched pages exist.

BLOCKS_SECONDS = 5.0
"""CPU time for all blocks of a case, where the duration of one is unknown"""


def verify_blocks(
    verdict: Verdict, workload: AnyWorkload, plan: Plan, run: RunBlocks, seed: int, named: Collection[int] = ()
) -> Verdict:
    """Return a good verdict on small cases with that on the plan's at full size added; any other as it is.

    Of a user's own kernel, blocks are among those run whose numbers are `named`, as the kernel's text may.
    """
    if not verdict.correct or not plan:
        return verdict

    def judge(case: CaseIdentity, launch: Launch, own_seed: int) -> CaseResult | None:
        full = workload.full_size()
        if launch.then:
            return _judge_chain(workload, case, launch, run, own_seed, verdict.device)
        if isinstance(case, FullCase) and case.many_pages and verdict.device != EXECUTOR:
            return _not_judged(case, own_seed, "they touch more memory than the emulator has")
        asked = full.draw_blocks(case, launch, own_seed)
        if asked is None:
            return None
        if full.unknown_cost:
            asked = with_named(asked, named, own_seed)
        failure: KernelCrashed | KernelHung | NothingWritten | None = None
        try:
            asked, traces = _run(asked, run, own_seed, full.unknown_cost)
            found = check_blocks(workload, case, asked, traces, own_seed)
        except (KernelCrashed, KernelHung, NothingWritten) as raised:
            failure = raised
            found = replace(failed(case, own_seed, str(raised)), part=_judged_part(case, asked))
        if not found.correct and _counts(workload, case, failure, run, own_seed):
            if isinstance(failure, KernelFailure):
                raise failure
            return found
        together = _judge_groups(workload, full.groups(case, launch, own_seed), run, own_seed)
        if together is not None:
            return together
        return found if found.correct else _not_judged(case, own_seed, "one alone is not right")

    more = run_plan(plan, seed + 1, verdict.device, judge)
    cases, wall_ms = verdict.cases + more.cases, verdict.wall_ms + more.wall_ms
    return replace(more, cases=cases, wall_ms=wall_ms, coverage=verdict.coverage)


def _judge_groups(
    workload: AnyWorkload, groups: Iterable[tuple[Grouped, Grouped]], run: RunBlocks, seed: int
) -> CaseResult | None:
    """Return the result of groups of blocks that share tiles.

    None where no way to group them is right in small, or where the groups of a launch of this size need others.
    """
    for (small_case, small), (case, asked) in groups:
        try:
            if not check_blocks(workload, small_case, small, run(small, seed), seed).correct:
                continue
        except (KernelFailure, NothingWritten):
            continue
        try:
            asked, traces = _run(asked, run, seed, unknown_cost=True)
        except KernelHung:
            continue  # they wait for blocks of other groups
        try:
            return check_blocks(workload, case, asked, traces, seed)
        except NothingWritten as wrong:
            if not _left_in_scratch(asked, traces):
                return replace(failed(case, seed, str(wrong)), part=_judged_part(case, asked))
    return None


def _judge_chain(
    workload: AnyWorkload, case: CaseIdentity, launch: Launch, run: RunBlocks, seed: int, device: str
) -> CaseResult:
    """Return the result of blocks of the last of several kernels, with all blocks that store what these read.

    They count if the same is right of a small launch. The emulator does not tell what a block read.
    """
    full = workload.full_size()
    if device != EXECUTOR or not full.needs_others(case):
        return _not_judged(case, seed, f"it launches {1 + len(launch.then)} kernels")
    small = full.in_small(case)
    try:
        parts, _ = full.chained(case, None, seed, run, BLOCKS_SECONDS / 2)
        if not parts or not _worst(workload, small, parts, seed, None).correct:
            return _not_judged(case, seed, "which blocks store what others read is unclear")
    except (KernelFailure, WrongBlock):
        return _not_judged(case, seed, "one needs others")
    try:
        parts, blocks = full.chained(case, launch, seed, run, BLOCKS_SECONDS / 2)
    except WrongBlock as wrong:
        return failed(case, seed, str(wrong))
    if not parts:
        return _not_judged(case, seed, "which blocks store what others read is unclear")
    last = launch.then[-1].launch
    return _worst(workload, case, parts, seed, f"{blocks:,} of {prod(last.grid):,} blocks of the last kernel")


def _left_in_scratch(asked: BlockLaunch, traces: Sequence[BlockTrace]) -> bool:
    """Return whether zeroed scratch memory is not zero behind some blocks, as counters are that other blocks end."""
    zeroed = [a.name for a in asked.arguments if isinstance(a, ScratchParameter) and a.zeroed]
    return any(held.any() for trace in traces for name in zeroed for _, held in trace.pages[name])


def _run(asked: BlockLaunch, run: RunBlocks, seed: int, unknown_cost: bool) -> tuple[BlockLaunch, list[BlockTrace]]:
    """Run the blocks, or as many as there is time for where the first alone show how long they take."""
    each = asked.together
    if not unknown_cost or len(asked.blocks) == each:
        return asked, run(asked, seed)
    before = _cpu_seconds()
    first = run(replace(asked, blocks=asked.blocks[:each]), seed)
    possible = int(BLOCKS_SECONDS / max(_cpu_seconds() - before, 1e-3))
    rest = asked.blocks[each : each * max(2, possible)]
    done = replace(asked, blocks=[*asked.blocks[:each], *rest])
    return done, first + run(replace(asked, blocks=rest), seed)


def _cpu_seconds() -> float:
    """Return the CPU seconds of this process and of those it has awaited, independent of the machine's load."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + used.ru_utime + used.ru_stime


def _counts(
    workload: AnyWorkload,
    case: CaseIdentity,
    failure: KernelCrashed | KernelHung | NothingWritten | None,
    run: RunBlocks,
    seed: int,
) -> bool:
    """Return whether blocks that fail at full size are a fault, and do not just miss other blocks.

    Where a right kernel's blocks may need one another, they are a fault if blocks of a small launch, each by itself, do
    what they should. Other blocks may wait for one another too, or write only what the last one of them adds up.
    """
    full = workload.full_size()
    if not full.needs_others(case) and not isinstance(failure, KernelHung | NothingWritten):
        return True
    alone = full.alone(case, seed)
    if alone is None:
        return True
    try:
        return check_blocks(workload, full.in_small(case), alone, run(alone, seed), seed).correct
    except (KernelFailure, NothingWritten):
        return False


MOST_NAMED = 64
"""blocks that are run because the text names their numbers"""
_NUMBER = re.compile(r"(?<![\w.])(0[xX][0-9a-fA-F]+|[1-9]\d*)(?=[uUlL]*(?![\w.]))")


def numbers_in(text: str) -> frozenset[int]:
    """Return the whole numbers that a text names, and for what begins behind one, the next."""
    return frozenset(int(found, 0) + n for found in _NUMBER.findall(blank_comments(text)) for n in (0, 1))


def with_named(asked: BlockLaunch, named: Collection[int], seed: int) -> BlockLaunch:
    """Return the launch with blocks added whose places in the grid, or numbers, are named; in an order by seed."""
    grid, random = asked.launch.grid, np.random.default_rng(seed)
    known = {block.number for block in asked.blocks}
    x, y, z = ([*(n for n in sorted(named) if n < size), None] for size in grid)
    places = [(i, j, k) for i in x for j in y for k in z if (i, j, k) != (None, None, None)]
    numbers = [n for n in sorted(named) if n < prod(grid)]
    for place in random.permutation(len(places))[:MOST_NAMED]:
        i, j, k = (random.integers(size) if at is None else at for at, size in zip(places[place], grid, strict=True))
        numbers.append(int((k * grid[1] + j) * grid[0] + i))
    added = [n for n in dict.fromkeys(random.permutation(numbers).tolist()) if n not in known][:MOST_NAMED]
    blocks = [*asked.blocks, *(replace(asked.blocks[0], number=n) for n in added)]
    return replace(asked, blocks=[blocks[n] for n in random.permutation(len(blocks))])


def _not_judged(case: CaseIdentity, seed: int, reason: str) -> CaseResult:
    part = f"no block at full size: {reason}"
    return CaseResult(case.name, str(case.problem), seed, True, None, None, None, part=part)


def check_blocks(
    workload: AnyWorkload, case: CaseIdentity, asked: BlockLaunch, traces: list[BlockTrace], seed: int
) -> CaseResult:
    """Return whether the blocks wrote what they should and nothing else.

    The figures are those of the part with the largest error.
    """
    judged = _judged_part(case, asked)
    try:
        parts = workload.full_size().written_parts(case, asked, traces)
    except NothingWritten:
        raise
    except WrongBlock as wrong:
        return replace(failed(case, seed, str(wrong)), part=judged)
    if not parts:
        return CaseResult(case.name, str(case.problem), seed, True, None, None, None, part=judged)
    return _worst(workload, case, parts, seed, judged)


def _worst(
    workload: AnyWorkload, case: CaseIdentity, parts: Sequence[WrittenPart], seed: int, judged: str | None
) -> CaseResult:
    results = [compare(workload, p.case, p.drawn, p.outputs, seed, p.expected) for p in parts]
    worst = next((r for r in results if not r.correct), None) or max(results, key=share_of_allowed)
    return replace(worst, problem=str(case.problem), part=parts[0].case.part or judged)


def _judged_part(case: CaseIdentity, asked: BlockLaunch) -> str | None:
    """Return how many of the launch's blocks are run, and how much of the problem they have, where that is not all."""
    blocks, total = len(asked.blocks), prod(asked.launch.grid)
    some = f"{blocks:,} of {total:,} blocks" if blocks < total else None
    return ", ".join(part for part in (some, case.part) if part) or None
