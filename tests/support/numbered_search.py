"""A search whose candidates are numbers, on the faulty device."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from benchmarks.instant import InstantWorkers
from evoengine.devices.driver import GpuDevice
from evoengine.gpu import find_gpu
from evoengine.ledger.store import open_ledger
from evoengine.records import Device
from evoengine.sandbox.worker_process import WorkerLimits
from evoengine.search.coordinator import Coordinator
from evoengine.search.evaluators import GpuEvaluator, single_worker
from evoengine.search.identity import Identity, Setting
from evoengine.space.space import load_space
from evoengine.stages.render import fill
from evoengine.stages.tasks import predict_task
from evoengine.workloads import parse_problem
from evoengine.workloads.base import Target
from tests.support import faulty_device

SPACE = """\
kernel = "attention"
[knobs]
family = ["numbered"]
number = [{numbers}]
[cost.numbered]
mufu = 1000
[launch.numbered]
threads = 32
grid = [1, 1, 1]
shared = 0
"""
WORKLOAD, PROBLEM = parse_problem("b1,h1,s64,d32,fp16")
GPU = find_gpu("h100")
TARGET = Target(WORKLOAD, PROBLEM, GPU)
DEVICE = GpuDevice(0, "NVIDIA Faulty", "GPU-00000000-0000-0000-0000-000000000000", 90, 2**34)

SECONDS = 30.0
"""a task's time; one that behaves takes a fiftieth of a second"""


def limits(seconds: float = SECONDS) -> WorkerLimits:
    """Of the workers that compile."""
    return WorkerLimits(seconds, memory_bytes=512 << 20, file_bytes=1 << 20, warm_up=faulty_device.note_warm)


class NumberedSearch:
    """Runs searches over numbers; `faults` says which number does what wrong. With `known` they take over what the
    ledger knows. With `compiles_here` candidates are compiled in this process, which no worker is started for."""

    compiles_here = False

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.templates = folder / "templates"
        (self.templates / "attention").mkdir(parents=True)
        self.ledger = open_ledger(str(folder / "evo.db"), create=True)
        self.finished: list[int] = []

    def space(self, numbers: Iterable[int]):
        path = self.folder / "numbers.toml"
        path.write_text(SPACE.format(numbers=", ".join(map(str, numbers))))
        return load_space(path, PROBLEM, GPU)

    def begin(
        self,
        numbers,
        faults=lambda _: None,
        *,
        trials=None,
        jobs=2,
        sampler="random",
        timed=True,
        fill=fill,
        remeasure=False,
        run=None,
    ) -> tuple[Setting, int]:
        """Writes the template, in which every number's source says what goes wrong with it, and starts a run, or goes
        on with the one that is given."""
        wrong = {n: fault for n in numbers if (fault := faults(n))}
        cases = "".join(f"{{% if number == {n} %}} fault {p} {f}{{% endif %}}" for n, (p, f) in wrong.items())
        template = self.templates / "attention" / "numbered.cu.j2"
        template.write_text(f"// candidate {{{{ number }}}}{cases}\n")
        space = self.space(numbers)
        setting = Setting(
            TARGET, space, self.templates, sampler, 1, trials or len(numbers), None, jobs, timed, fill=fill,
            remeasure=remeasure,
        )  # fmt: skip
        if run is not None:
            assert self.ledger.resume_run(run, setting.trials, None) is not None
            return setting, run
        run = self.ledger.start_run(
            gpu=GPU.key, problem=str(PROBLEM), device=Device("faulty"), space=space, sampler=sampler, seed=1,
            command="test",
        )  # fmt: skip
        return setting, run

    def coordinator(
        self, numbers, faults=lambda _: None, *, tasks=faulty_device, seconds=SECONDS, on_change=lambda _: None,
        compiler=faulty_device.compile_task, predictor=predict_task, runners=single_worker, workers=None, known=False,
        **options,
    ) -> Coordinator:  # fmt: skip
        setting, run = self.begin(numbers, faults, **options)
        judge = GpuEvaluator(TARGET, DEVICE, 1, tasks, seconds, runners=runners)
        if self.compiles_here and workers is None:
            workers = InstantWorkers(setting.jobs)
        identity = Identity(setting, {"device": DEVICE.name}) if known else None
        return Coordinator(
            setting,
            self.ledger,
            run,
            judge,
            on_change,
            self.finished.append,
            compiler,
            limits(seconds),
            predictor,
            workers,
            identity,
        )

    def candidates(self):
        return self.ledger.candidates()
