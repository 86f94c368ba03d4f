"""The gate without a GPU: two judges run the same cases on a candidate.

The executor runs its machine code, with the registers, addresses and descriptors that the compiler chose; the emulator
runs its source text. Both name source lines. The executor comes first, for every candidate of an architecture that it
can read. A candidate is judged in two steps: the short cases by one judge, and, where it may rank, the rest by both:
long cases, and blocks of the problem itself. The blocks, and cases that one judge suffices for, are run as machine
code, which is the cheaper road, and by the emulator where the executor cannot judge. What is ranked near the top has
passed both judges; where one cannot judge, the other judges alone, and the verdict says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from evoengine.devices.base import VISIT, Executed, KernelFailure, Round, RunRounds
from evoengine.devices.emulator.build import build
from evoengine.devices.emulator.run import run_blocks, run_rounds
from evoengine.devices.pool import BlockLaunch, BlockTrace
from evoengine.errors import MachineError, UsageError
from evoengine.records import (
    EMULATOR,
    EXECUTOR,
    GATE_VERSION,
    CompiledCandidate,
    Judged,
    Plans,
    Source,
    Verdict,
)
from evoengine.sass import core, rounds
from evoengine.sass.cubin import read_kernel
from evoengine.sass.launch import require_arch
from evoengine.sass.listing import listing_of
from evoengine.stages.coverage import joined, without_missing
from evoengine.stages.full_size import RunBlocks, verify_blocks
from evoengine.stages.source_lines import name_source_lines
from evoengine.stages.verify import verify
from evoengine.workloads.base import AnyWorkload

if TYPE_CHECKING:
    from evoengine.virtual.host import HostJudge

LAUNCH_SECONDS = 20.0
"""time limit of one emulated launch of a gate case, which normally takes milliseconds"""


class CannotJudge(Exception):
    """A judge cannot judge a candidate, whatever the candidate does. The message is a clause that states why."""


@dataclass(frozen=True, slots=True)
class Judge:
    """A device without a GPU that runs a candidate's launches."""

    device: str
    run: RunRounds
    run_blocks: RunBlocks


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
            return rounds.run_blocks(executables[source.entry], asked, seed)

    return Judge(EXECUTOR, launch, launch_blocks)


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
        return run_blocks(executable, source.entry, asked, seed, LAUNCH_SECONDS)

    return Judge(EMULATOR, launch, launch_blocks)


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
    return verify_blocks(both, workload, plans.full, judge.run_blocks, seed + 2)


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
                judge = self._prepare(device)
            except CannotJudge as error:
                found.append(_abstention(device, error))
            else:
                found.append(self._short(judge))
                break
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
            judge = self._prepare(device)
        except CannotJudge as error:
            return _abstention(device, error)
        short = earlier or self._short(judge)
        if first:
            return judge_rest(judge, self._workload, self._plans, self._seed, short)
        return judge_second(judge, self._workload, self._plans, self._seed, short)

    def _prepare(self, device: str) -> Judge:
        if device == EMULATOR:
            return emulator(self._contender.source, self._contender.binary.arch)
        if self._failed:
            raise CannotJudge(f"its machine code was not executed: {self._failed}")
        return executor(self._contender)

    def _short(self, judge: Judge) -> Verdict:
        return judge_short(judge, self._workload, self._plans, self._seed)


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
