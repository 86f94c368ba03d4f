"""Time candidate, incumbent and baseline alternately on a GPU, gated before and after.

Runs in the GPU's own process. The candidate passes the gate first, again at the full problem, in unpredictable
repetitions, and once more after it was timed. `bench.py` has the timed calls and their checks, `clock.py` the clock,
`rounds.py` the rounds; `figures.py` makes figures from the samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import numpy as np
import torch

from evoengine.devices import cuda_api
from evoengine.devices.base import KernelCrashed, KernelFailure
from evoengine.devices.cuda import CUDA_ERRORS, CudaKernel, first_line, rounds_by_launches
from evoengine.devices.torch_gpu import gpu as torch_gpu
from evoengine.errors import MachineError
from evoengine.records import (
    AnyBaseline,
    Baseline,
    CaseResult,
    CompiledCandidate,
    Finals,
    Measurement,
    Outcome,
    Plan,
    Policy,
    RefusedBaseline,
    Rejection,
    Verdict,
)
from evoengine.stages.verify import verify
from evoengine.timing.bench import PLAIN, BaselineRefused, Bench
from evoengine.timing.clock import Prepared
from evoengine.timing.figures import TICK_US, Subject, choose_policy, make_baselines, make_figure, make_sustained
from evoengine.timing.finals import Ranking, rank, run_finals
from evoengine.timing.rounds import BASELINE, Rounds, Timed, run_rounds
from evoengine.timing.statistics import clearly_slower, stop_reason
from evoengine.workloads.base import Problem, Target
from evoengine.workloads.packages import PACKAGES

_Found = TypeVar("_Found")
NONE_FAILED: Mapping[str, str] = {}


class BaselineFailed(Exception):
    """The baseline `name` crashed or hung; after that this process must be replaced."""

    def __init__(self, name: str, outcome: Outcome, reason: str) -> None:
        super().__init__(f"{name}: {reason}")
        self.name, self.outcome = name, outcome


class NoBaseline(Exception):
    """No baseline can be timed; the message gives the reason of each."""


def measure(
    target: Target,
    contender: CompiledCandidate,
    plan: Plan,
    seed: int,
    incumbent: CompiledCandidate | None,
    baseline: Baseline,
) -> tuple[Verdict, Measurement | None] | Rejection:
    """Gate, time and gate again a candidate on the GPU. There is a measurement only if all cases were correct."""
    torch_gpu()  # its context
    verdict = Verdict(cuda_api.device_name(), None, None, (), 0.0)
    try:
        loaded = _load(contender)
        verdict = verify(target.workload, plan, rounds_by_launches(loaded.run), verdict.device, seed)
        if verdict.outcome in (Outcome.CRASHED, Outcome.HUNG):
            return Rejection(verdict.outcome, verdict.reason or str(verdict.outcome), verdict=verdict)
        if not verdict.correct:
            return verdict, None
        bench = _bench(target)
        checked = bench.check(loaded, contender, "full problem", seed + 1)
        verdict = _joined(verdict, checked.cases)
        if not verdict.correct:
            return verdict, None
        timed = Timed(bench.kernel(loaded, contender, baseline.policy).repeat, bench.output_check(checked))
        rounds = _race(bench, timed, incumbent, baseline, seed)
        verdict = _joined(verdict, _while_timed(rounds, target.problem, seed + 1))
        if verdict.correct:
            again = bench.check(loaded, contender, "full problem after timing", seed + 2)
            verdict = _joined(verdict, again.cases)
        if not verdict.correct:
            return verdict, None
        return verdict, make_figure(Subject(target, baseline), rounds, "candidate", contender.binary.mix, incumbent)
    except torch.OutOfMemoryError as error:
        raise _out_of_memory(target.problem) from error
    except KernelFailure as failure:
        return _rejected(verdict, failure, target.problem, seed + 1)
    except CUDA_ERRORS as error:
        crash = KernelCrashed(f"kernel {contender.source.entry}: {first_line(error)}")
        return _rejected(verdict, crash, target.problem, seed + 1)


def _rejected(verdict: Verdict, failure: KernelFailure, problem: Problem, seed: int) -> Rejection:
    """Return a rejection with the gate's earlier findings.

    The full problem is added as the case in which the kernel failed.
    """
    reason = str(failure)
    if failure.outcome in (Outcome.CRASHED, Outcome.HUNG):
        full = CaseResult("full problem", str(problem), seed, False, None, None, None, reason)
        cases = (*verdict.cases, full)
        verdict = replace(verdict, outcome=failure.outcome, reason=f"{full.name}: {reason}", cases=cases)
    return Rejection(failure.outcome, reason, verdict=verdict if verdict.cases else None)


def _race(bench: Bench, candidate: Timed, incumbent: CompiledCandidate | None, baseline: Baseline, seed: int) -> Rounds:
    """Time the candidate until its median is settled, or until it is clearly slower than the incumbent."""
    contenders = {"candidate": candidate, **_beside(bench, baseline)}
    if incumbent:
        best = bench.kernel(_load(incumbent), incumbent, baseline.policy, f"of trial {incumbent.trial}")
        contenders["incumbent"] = Timed(best.repeat)

    def enough(samples: Mapping[str, list[float]]) -> str | None:
        if incumbent and clearly_slower(samples["candidate"], samples["incumbent"]):
            return "beaten"
        return stop_reason(samples["candidate"], TICK_US / baseline.policy.batch)

    return run_rounds(contenders, np.random.default_rng(seed), enough, bench.clock.last_reading, sleep=torch_gpu().rest)


def _beside(bench: Bench, baseline: Baseline) -> dict[str, Timed]:
    try:
        return {BASELINE: Timed(bench.baseline(baseline.name, baseline.policy).repeat)}
    except BaselineRefused:  # out of memory, since it was timed before
        return {}


def _while_timed(rounds: Rounds, problem: Problem, seed: int) -> tuple[CaseResult, ...]:
    reason = rounds.wrong.get("candidate")
    name = "full problem while timed"
    return (CaseResult(name, str(problem), seed, False, None, None, None, reason),) if reason else ()


def baselines(target: Target, seed: int, failed: Mapping[str, str] = NONE_FAILED) -> list[AnyBaseline]:
    """Time in turn every baseline that supports the problem and computes it correctly, except those that `failed`.

    Those are the workload's own and the kernels of installed packages. If none of the former is left, the workload's
    computation by torch's operators takes their place. `failed` gives the reason for each, or for all PACKAGES. Those
    that cannot be timed are returned too, with the reason. Chooses the policy under which all of the problem's kernels
    are timed. Raises BaselineFailed for the first that crashes or hangs, NoBaseline with all reasons if none can be
    timed, and MachineError if the GPU's memory does not hold the problem.
    """
    bench = _bench(target)
    bench.refresh(seed)
    of_packages, of_library = bench.package_baselines(), target.workload.tensors().baselines(target.problem)
    left_out = {name: reason for name, reason in failed.items() if name != PACKAGES}
    if PACKAGES in failed:
        left_out |= {name: f"{name}: {failed[PACKAGES]}" for name in of_packages}
    estimate = partial(bench.baseline_estimate, seed=seed)
    estimates = _of_supported([n for n in of_library if n not in left_out], estimate, left_out)
    if not estimates and not failed.keys() & set(of_library):
        estimates = _of_supported([PLAIN], estimate, left_out)
    estimates |= _of_supported([n for n in of_packages if n not in left_out], estimate, left_out)
    if not estimates:
        raise NoBaseline("; ".join(left_out.values()))
    policy = choose_policy(min(estimates.values()))
    prepared = _of_supported(list(estimates), lambda name: bench.baseline(name, policy), left_out)
    if not prepared:
        raise NoBaseline("; ".join(left_out.values()))
    timed = {name: Timed(found.repeat) for name, found in prepared.items()}
    rounds = run_rounds(
        timed,
        np.random.default_rng(seed),
        lambda samples: _all_stopped(samples, policy),
        bench.clock.last_reading,
        sleep=torch_gpu().rest,
    )
    if not any(rounds.samples.values()):
        raise NoBaseline(f"none of {rounds.dropped.total()} repetitions counts: {rounds.ended}")
    torch_gpu().release_memory()  # the scores of the math backend, which no candidate needs
    device = cuda_api.device_name()
    refused = [RefusedBaseline(name, device, why.removeprefix(f"{name}: ")) for name, why in left_out.items()]
    return [*make_baselines(target, policy, rounds), *refused]


def _of_supported(names: Sequence[str], ask: Callable[[str], _Found], left_out: dict[str, str]) -> dict[str, _Found]:
    """Return the answer for each baseline that supports the problem; the others enter `left_out`, with a sentence.

    Raises BaselineFailed for the first that crashes or hangs.
    """
    found: dict[str, _Found] = {}
    for name in names:
        try:
            found[name] = _unless_failed(name, partial(ask, name))
        except BaselineRefused as refusal:
            left_out[name] = f"{name}: {refusal}"
    return found


def _unless_failed(name: str, run: Callable[[], _Found]) -> _Found:
    """Run a baseline. Raises BaselineFailed if it crashed or hung."""
    try:
        return run()
    except KernelFailure as failure:
        raise BaselineFailed(name, failure.outcome, str(failure)) from failure
    except CUDA_ERRORS as error:
        raise BaselineFailed(name, Outcome.CRASHED, first_line(error)) from error


def _all_stopped(samples: Mapping[str, Sequence[float]], policy: Policy) -> str | None:
    """Return the last contender's reason once every contender has enough samples, else None."""
    reasons = [stop_reason(own, TICK_US / policy.batch) for own in samples.values()]
    return reasons[-1] if all(reasons) else None


def finals(target: Target, contenders: Sequence[CompiledCandidate], seed: int, baseline: Baseline) -> Finals:
    """Time the best candidates against each other and the baseline in the same rounds.

    Then each of them is timed back to back.
    """
    bench = _bench(target)
    try:
        prepared, timed, wrong = _finalists(bench, contenders, baseline.policy, seed)
        rounds = run_finals(
            {**timed, **_beside(bench, baseline)},
            list(timed),
            np.random.default_rng(seed),
            bench.clock.last_reading,
            torch_gpu().rest,
        )
        wrong |= {int(name): reason for name, reason in rounds.wrong.items()}
        subject, mixes = Subject(target, baseline), {str(c.trial): c.binary.mix for c in contenders}
        figures = {int(n): make_figure(subject, rounds, n, mixes[n]) for n in timed if n in rounds.samples}
        sustained = {
            trial: found
            for trial, figure in figures.items()
            if (found := make_sustained(subject, prepared[str(trial)].sustained(figure.median_us), mixes[str(trial)]))
        }
    except torch.OutOfMemoryError as error:
        raise _out_of_memory(target.problem) from error
    except CUDA_ERRORS as error:
        trials = ", ".join(str(c.trial) for c in contenders)
        raise KernelCrashed(f"one of trials {trials}: {first_line(error)}") from error
    if not figures:
        return Finals((), (), {}, wrong=wrong)
    registers = {str(c.trial): c.binary.registers for c in contenders}
    ranking = rank({str(trial): rounds.samples[str(trial)] for trial in figures}, registers)
    return _with_names(ranking, Finals((), (), figures, sustained=sustained, wrong=wrong))


def _finalists(
    bench: Bench, contenders: Sequence[CompiledCandidate], policy: Policy, seed: int
) -> tuple[dict[str, Prepared], dict[str, Timed], dict[int, str]]:
    """Return, by trial, the candidates that are correct on fresh inputs, ready for timing.

    For the others it is what was wrong.
    """
    prepared: dict[str, Prepared] = {}
    timed: dict[str, Timed] = {}
    wrong: dict[int, str] = {}
    for contender in contenders:
        loaded = _load(contender)
        checked = bench.check(loaded, contender, "full problem before finals", seed)
        if checked.wrong:
            wrong[contender.trial] = f"before the first repetition: {checked.wrong.reason}"
            continue
        name = str(contender.trial)
        prepared[name] = bench.kernel(loaded, contender, policy)
        timed[name] = Timed(prepared[name].repeat, bench.output_check(checked))
    return prepared, timed, wrong


def _with_names(ranking: Ranking, finals: Finals) -> Finals:
    lead = (ranking.lead.median, ranking.lead.low, ranking.lead.high) if ranking.lead else None
    order, tied, left = (tuple(map(int, names)) for names in (ranking.order, ranking.tied, ranking.open))
    return replace(finals, order=order, tied=tied, open=left, lead=lead)


def _load(contender: CompiledCandidate) -> CudaKernel:
    return CudaKernel(contender.binary, contender.source.entry, contender.source.launch)


def _out_of_memory(problem: Problem) -> MachineError:
    free, total = cuda_api.memory_info()
    return MachineError(
        f"the GPU ran out of memory on {problem}: {free:,} of {total:,} bytes are free; end other programs on the GPU "
        "or choose a smaller --problem"
    )


def _joined(verdict: Verdict, cases: tuple[CaseResult, ...]) -> Verdict:
    wrong = next((c for c in cases if not c.correct), None)
    return replace(
        verdict,
        cases=verdict.cases + cases,
        outcome=Outcome.INCORRECT if wrong else None,
        reason=f"{wrong.name}: {wrong.reason}" if wrong else None,
    )


_kept: dict[Target, Bench] = {}
"""the last target's"""


def forget() -> None:
    """Drop the last target's bench, whose memory the next one may need."""
    _kept.clear()


def _bench(target: Target) -> Bench:
    """Return the target's bench, and give back the memory of another target's and of what was timed before.

    The graphs of a repetition own memory, which torch keeps when they are gone.
    """
    if target not in _kept:
        forget()
    torch_gpu().release_memory()
    if target not in _kept:
        _kept[target] = Bench(target)
    return _kept[target]
