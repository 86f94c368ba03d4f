"""Time on a GPU the candidates that a search without one left in the ledger."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from evoengine.devices.driver import GpuDevice, require_arch, resolve_gpu, supports_arch
from evoengine.errors import NothingFound
from evoengine.hints import hint
from evoengine.ledger.store import Ledger, open_ledger
from evoengine.ledger.transfer import is_elsewhere
from evoengine.records import Baseline, Candidate
from evoengine.search.agreement import Agreement, Pair, measured_pairs, of_one_model, rank_agreement
from evoengine.search.evaluators import GpuEvaluator
from evoengine.search.remeasure import Remeasurer, unmeasured_candidates
from evoengine.search.targets import spaces_of, stored_gpu, stored_target
from evoengine.stages.toolchain import compiler_version
from evoengine.text import command_line
from evoengine.tuning.boards import custom_definition
from evoengine.tuning.setup import Echo, ledger_device, lock_gpu, recording_failure, require_gpus, silent
from evoengine.workloads.base import Target


@dataclass(frozen=True, slots=True)
class MeasureResult:
    run: int
    baselines: tuple[Baseline, ...]
    best: tuple[Candidate, ...]
    pairs: tuple[Pair, ...]
    """estimates beside figures that are comparable with those of `best`"""
    agreement: Agreement
    notes: tuple[str, ...]


class MeasureRun:
    """Gates and times the ledger's candidates on a GPU, best estimate first: the first `top`, or all if it is None.

    Raises MachineError where there is no GPU that can run them.
    """

    def __init__(
        self,
        top: int | None,
        gpu: str | None = None,
        problem: str | None = None,
        db: str | None = None,
        echo: Echo = silent,
        on_finish: Callable[[Candidate], None] = lambda candidate: None,
    ) -> None:
        require_gpus(compilers=())
        self._top, self._gpu, self._problem, self._db = top, gpu, problem, db
        self._echo, self._on_finish = echo, on_finish
        self._remeasurer: Remeasurer | None = None
        self.stopped = False

    def stop(self) -> None:
        """Stop after the current candidate."""
        self.stopped = True
        if self._remeasurer:
            self._remeasurer.stop()

    def run(self) -> MeasureResult:
        """Measure the candidates. Raises NothingFound if there is nothing to measure."""
        with open_ledger(self._db, create=False) as ledger:
            gpu, problem = ledger.targets.last(self._gpu, self._problem)
            target = stored_target(ledger, problem, stored_gpu(ledger, gpu))
            left = unmeasured_candidates(ledger, problem, gpu)
            if not left:
                raise NothingFound(
                    f"the ledger holds no correct candidate of {target} that is still to be measured: "
                    f"{hint('history', db=ledger.db, problem=problem, gpu=gpu)} shows how each ended"
                )
            device = _device_for(target, left)
            with lock_gpu(device, self._echo):
                return self._measure(ledger, target, left, device)

    def _measure(self, ledger: Ledger, target: Target, left: Sequence[Candidate], device: GpuDevice) -> MeasureResult:
        problem, named = str(target.problem), target.gpu
        if device.name != named.name:
            self._echo(f"compiled for {named.name}, timed on {device.name}, of the same architecture")
        chosen = left[: self._top]
        self._echo(f"{len(chosen)} of {len(left)} candidates of {problem}, on {device.name} · ledger {ledger.place}")
        here = replace(target, gpu=resolve_gpu(device, named))
        spaces, seed = spaces_of(ledger, chosen, here), secrets.randbelow(2**31)
        searched = next(r for r in ledger.runs() if r.id == chosen[0].run)
        run = ledger.start_run(
            gpu=named.key,
            problem=problem,
            device=ledger_device(device),
            space=spaces[searched.id],
            sampler="measure",
            seed=seed,
            command=command_line(),
            objectives=searched.objectives,
            definition=searched.definition,
            gpu_definition=custom_definition(named),
            kernel=searched.kernel,
        )
        judge = GpuEvaluator(here, device, seed, long_run_us=partial(ledger.long_run_us, run))
        self._remeasurer = Remeasurer(ledger, run, judge, here, seed, self._on_finish)
        if self.stopped:
            self._remeasurer.stop()
        with recording_failure(ledger, run):
            notes = self._remeasurer.measure(chosen, spaces)
        ledger.finish_run(run, "interrupted" if self.stopped else "all candidates done")
        best = ledger.best(problem, named.key, top=10)
        like = {(m.device, str(m.policy)) for m in (c.ranked_by for c in best)}
        pairs = [p for p in measured_pairs(ledger, problem, named.key) if (p.device, p.policy) in like]
        agreement = rank_agreement([p.figures for p in of_one_model(pairs)])
        return MeasureResult(run, tuple(ledger.baselines(run)), tuple(best), tuple(pairs), agreement, tuple(notes))


def _device_for(target: Target, left: Sequence[Candidate]) -> GpuDevice:
    """Return the GPU that can run the candidates' binaries. Raises MachineError if there is none."""
    compiled = [c for c in left if not is_elsewhere(c.contender.binary)]
    imported = len(compiled) < len(left)
    compilers = {c.contender.binary.compiler for c in compiled} | ({compiler_version()} if imported else set())
    devices = require_gpus(compilers)
    device = next((d for d in devices if supports_arch(d, target.gpu.arch)), devices[0])
    if imported:
        require_arch(device, target.gpu.arch, str(target))
    for candidate in compiled:
        require_arch(device, candidate.contender.binary.arch, f"trial {candidate.trial}")
    return device
