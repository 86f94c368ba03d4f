"""A complete search, from the user's options to the ranking."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from evoengine import __version__
from evoengine.devices.driver import GpuDevice, resolve_gpu
from evoengine.errors import UsageError, did_you_mean
from evoengine.gpu import AUTO
from evoengine.ledger.optuna.study import Projection, begin_study
from evoengine.ledger.store import Ledger, open_ledger
from evoengine.ledger.transactions import Patience
from evoengine.objectives import DEFAULT as DEFAULT_OBJECTIVE
from evoengine.objectives import Objective, asked_objectives, known_objectives, parse_objectives
from evoengine.paths import write_atomically
from evoengine.records import RUNNING, Candidate, Config, Kind, Run, listed
from evoengine.sandbox.worker_process import COMPILER_LIMITS
from evoengine.sass.chip import DEFAULT as DEFAULT_CLOCK
from evoengine.sass.chip import Clock
from evoengine.search import samplers
from evoengine.search.compilers import Renderer
from evoengine.search.coordinator import Coordinator
from evoengine.search.evaluators import make_evaluator
from evoengine.search.identity import Identity, Setting, environment, kernel_identity, templates_digest
from evoengine.search.progress import OnChange, OnTrial, Progress, ignore
from evoengine.search.recorded import RECORDED
from evoengine.search.reference import require_reference
from evoengine.stages.render import Fill, inert_knobs
from evoengine.tuning.boards import Choice, choose_gpu, custom_definition, find_stored_gpu, require_same_board
from evoengine.tuning.resume import SearchRequest, begin, named_run
from evoengine.tuning.setup import (
    Echo,
    Place,
    ThisMachine,
    drawn_seed,
    first_of_each_family,
    make_target,
    prepare_space,
    read_space,
    recording_failure,
    require_compilers,
    require_seed,
    silent,
    why_no_predictions,
)
from evoengine.workloads.base import Host, Target
from evoengine.workloads.triton_kernel import is_definition, read_host

DEFAULT_TRIALS = 60


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """The options of a search; each field is the option of `evoengine search` of that name."""

    problem: str | None = None
    """None: the workload's example"""
    gpu: str = AUTO
    """a name of gpus.toml; auto is the GPU of this machine, h100 if it has none"""
    gpu_file: Path | None = None
    """a TOML file that describes another GPU"""
    kernel: Path | None = None
    """a folder with the user's own kernel"""
    triton: str | None = None
    """FILE::KERNEL, a Triton kernel of the user's in a Python file"""
    call: str | None = None
    """with `triton`: the function of the file that launches the kernel on tensors of its own"""
    reference: str | None = None
    """with `triton`: the function of the file that returns what the kernel should write"""
    families: tuple[str, ...] = ()
    trials: int | None = None
    """None: 60, or the number of the resumed run"""
    minutes: float | None = None
    sampler: str | None = None
    """None: evolution"""
    device: str = "auto"
    objective: str | None = None
    """None: tflops"""
    space: Path | None = None
    templates: Path | None = None
    db: str | None = None
    jobs: int | None = None
    seed: int | None = None
    resume: int | None = None
    """the run to resume, 0 for the last one"""
    clock: str | None = None
    """clock for which times are predicted: boost, sustained or locked:MHZ; None: boost"""
    remeasure: bool = False
    """whether to evaluate kernels again whose results the ledger holds"""
    cluster: str | None = None
    """the Ray cluster on which to run: local, auto, ray://HOST:PORT or HOST:PORT"""
    timeout: float | None = None
    """seconds to wait for a GPU that the cluster does not have yet; None: no limit"""

    def __post_init__(self) -> None:
        """Raise UsageError for invalid values. The command line rejects most of them earlier."""
        if self.sampler is not None and self.sampler not in samplers.NAMES:
            near = did_you_mean(self.sampler, samplers.NAMES)
            raise UsageError(f"unknown sampler {self.sampler!r}; samplers are {', '.join(samplers.NAMES)}{near}")
        if self.device not in ("auto", "emulator", "cuda") and not self.device.startswith(RECORDED):
            near = did_you_mean(self.device, ("auto", "emulator", "cuda", RECORDED))
            raise UsageError(f"device {self.device!r} is not one of auto, emulator, cuda and {RECORDED}FILE{near}")
        if self.clock is not None:
            Clock.parse(self.clock)
        if self.minutes is not None and not 0 < self.minutes < math.inf:
            raise UsageError(f"--minutes is {self.minutes}; it must be above 0, or left out for no limit")
        if self.timeout is not None and (self.cluster is None or self.timeout < 0):
            raise UsageError(f"--timeout is {self.timeout}; it takes seconds, and requires --cluster")
        if self.cluster is not None and self.device.startswith(RECORDED):
            raise UsageError("--cluster contradicts --device recorded:FILE; give one of them")
        self._require_triton_alone()
        require_seed(self.seed)
        for name, value in (("trials", self.trials), ("jobs", self.jobs)):
            if value is not None and value < 1:
                raise UsageError(f"--{name} is {value}; it must be at least 1")

    def _require_triton_alone(self) -> None:
        if self.triton is None:
            for name in ("call", "reference"):
                if getattr(self, name) is not None:
                    raise UsageError(f"--{name} requires --triton FILE::KERNEL")
            return
        for name in ("kernel", "templates", "families"):
            if getattr(self, name):
                raise UsageError(
                    f"--{'family' if name == 'families' else name} contradicts --triton; leave one of them out"
                )
        if self.device == "cuda" or self.device.startswith(RECORDED):
            raise UsageError(
                f"--device {self.device} contradicts --triton: a Triton kernel is gated on the virtual GPU and ranked "
                "by predicted time"
            )

    @property
    def host(self) -> Host | None:
        """Return the user's Triton kernel with its functions. Raises UsageError if there is no such file."""
        return read_host(self.triton, self.call, self.reference) if self.triton else None


@dataclass(frozen=True, slots=True, repr=False)
class SearchResult:
    run: int
    progress: Progress
    best: tuple[Candidate, ...]
    """correct and ranked, best first"""
    invalid_proposals: int
    repeated_proposals: int
    missed: Mapping[int, str]
    """trials that are in the ledger but not in optuna-dashboard's study, with the reason"""
    pareto: bool = False
    """whether there were several objectives"""

    def __repr__(self) -> str:
        return f"SearchResult(run {self.run}, {self.progress.ended}: {listed(self.best)})"


def write_space(options: SearchOptions, file: Path) -> int:
    """Write the space that a search with these options would use, and return the number of its configurations.

    Raises UsageError as a search does, and if the file exists already.
    """
    if file.exists():
        raise UsageError(f"{file} already exists; --write-space takes the name of a new file")
    gpu = choose_gpu(options.gpu, options.gpu_file, partial(find_stored_gpu, options.db)).gpu
    space = read_space(options.space, make_target(options.problem, gpu, options.kernel, options.host), options.families)
    write_atomically(file, (space.text,))
    return len(space)


def complete_from_run(options: SearchOptions) -> SearchOptions:
    """Return the options with missing values taken from the run to continue.

    Raises NothingFound if there is no ledger, and UsageError if there is no such run.
    """
    assert options.resume is not None  # callers check this
    with open_ledger(options.db, create=False) as ledger:
        run = named_run(ledger, options.resume)
    if run.definition is not None and options.kernel is None and options.triton is None:
        named = "file with --triton and --call" if is_definition(run.definition) else "folder with --kernel"
        raise UsageError(f"run {run.id} searched a kernel of your own: name its {named}")
    if run.problem.startswith(RECORDED) and not options.device.startswith(RECORDED):
        raise UsageError(f"run {run.id} replayed a recorded file: name it with --device {RECORDED}FILE")
    conditions = run.conditions or {}
    device = "emulator" if options.device == "auto" and conditions.get("device") == ["emulator", None] else None
    return replace(
        options,
        resume=run.id,
        problem=options.problem or run.problem,
        gpu=run.gpu if options.gpu == AUTO and options.gpu_file is None else options.gpu,
        families=options.families or tuple(conditions.get("families", ())),
        sampler=options.sampler or run.sampler,
        objective=options.objective or asked_objectives(run.objectives),
        clock=options.clock or conditions.get("clock"),
        trials=options.trials or run.trials,
        minutes=options.minutes or (run.seconds / 60 if run.seconds else None),
        device=device or options.device,
    )


class Search:
    """A search that is ready to start: all options are checked, and nothing is written yet.

    Raises UsageError for invalid options, MachineError for what this machine lacks.
    """

    def __init__(
        self,
        options: SearchOptions,
        echo: Echo = silent,
        on_stage: Echo = silent,
        place: Place | None = None,
        first: Sequence[Config] = (),
    ) -> None:
        """Check the options. Configurations of `first` that are in the problem's space are evaluated first."""
        self._place = place = place or ThisMachine()
        on_stage("reading the problem")
        if options.resume is not None:
            options = complete_from_run(options)
        objective, sampler = options.objective or DEFAULT_OBJECTIVE, options.sampler or samplers.DEFAULT
        objectives = parse_objectives(objective)
        if len(objectives) > 1:
            require_several(objective, sampler)
        self._choice = place.choose_gpu(options.gpu, options.gpu_file, partial(find_stored_gpu, options.db))
        target = make_target(options.problem, self._choice.gpu, options.kernel, options.host)
        target = replace(target, clock=Clock.parse(options.clock) if options.clock else DEFAULT_CLOCK)
        device = options.device if options.host is None else "emulator"
        self._timing = place.choose_device(device, target.gpu, echo)
        if self._timing:
            target = replace(target, gpu=resolve_gpu(self._timing, target.gpu))
        on_stage("reading the space")
        require_compilers(target.gpu, emulated=self._timing is None)
        self._build = place.begin_build(self._timing is None and options.host is None, echo)
        self._renderer = Renderer()
        try:
            jobs = options.jobs or place.default_jobs(self._timing is not None)
            objectives = known_objectives(objectives, target.flops)
            s = _setting(options, target, objectives, self._timing is not None, jobs, self._renderer)
            self._setting = replace(s, first=tuple(config for config in first if s.space.contains(config)))
            if options.kernel or options.triton:
                on_stage("running the reference")
            require_reference(target, echo)
        except BaseException:
            self.close()
            raise
        self._options, self._echo, self._on_stage = options, echo, on_stage
        self._spent = 0.0
        """seconds that earlier processes of the run took"""
        self._stop: Callable[[], None] | None = None
        self._stopped = False
        self.number: int | None = None
        """of the run, once the ledger has it"""

    def stop(self) -> None:
        """Stop the search after the current event; its results are kept."""
        self._stopped = True
        if self._stop:
            self._stop()

    def run(self, on_change: OnChange = ignore, on_trial: OnTrial | None = None) -> SearchResult:
        self._on_stage("opening the ledger")
        try:
            with self._place.lock_gpu(self._timing, self._echo), open_ledger(self._options.db, create=True) as ledger:
                ledger.database.patience = Patience(self._echo)
                # a search on a GPU waits for the build only because predictions need it
                unpredictable = why_no_predictions(self._setting.target.gpu, self._build if self._timing else None)
                run = self.number = self._begin(ledger, unpredictable is None)
                with recording_failure(ledger, run):
                    return self._run(ledger, run, unpredictable, on_change, on_trial)
        finally:
            self.close()

    def close(self) -> None:
        """Release the resources of a search that does not run."""
        if self._build:
            self._build.close()
        self._renderer.close()

    def _begin(self, ledger: Ledger, predicted: bool) -> int:
        """Return the number of the run, new or continued. `predicted` states whether the model supports the GPU."""
        s, o, device = self._setting, self._options, self._place.ledger_device(self._timing)
        require_same_board(ledger, self._choice.gpu)
        self._environment = environment(s, device, predicted)
        asked = SearchRequest(
            str(s.target.problem),
            s.target.gpu.key,
            s.space.name,
            s.space.sha256,
            s.sampler,
            ",".join(objective.name for objective in s.objectives),
            s.trials,
            s.seconds,
            o.seed,
            self._environment | {"templates": templates_digest(s), "families": list(o.families)},
        )
        begun = begin(
            ledger,
            asked,
            o.resume,
            self._echo,
            device=device,
            space=s.space,
            seed=s.seed,
            definition=s.target.workload.definition_text,
            gpu_definition=custom_definition(self._choice.gpu),
            kernel=kernel_identity(s.target.workload),
        )
        self._setting, self._spent = replace(s, seed=begun.seed), begun.spent
        return begun.run

    def _run(
        self, ledger: Ledger, run: int, unpredictable: str | None, on_change: OnChange, on_trial: OnTrial | None
    ) -> SearchResult:
        s, target = self._setting, self._setting.target
        self._on_stage("checking which knobs change kernels")
        _announce(s, self._choice, self._timing, unpredictable, ledger.place, run, self._echo)
        if others := concurrent_searches(ledger, run):
            self._echo(others)
        kind = Kind.MEASURED if self._timing else Kind.ESTIMATED
        study = begin_study(ledger, run, kind, {knob.name: knob.values for knob in s.space.knobs})
        long_run_us = partial(ledger.long_run_us, run)
        judge = make_evaluator(target, self._timing, s.seed, long_run_us, self._place.runners, self._build)
        self._on_stage("starting the workers")
        workers = self._place.compilers(s.jobs, COMPILER_LIMITS)
        finish = finisher(ledger, study, on_trial)

        def changed(progress: Progress) -> None:
            study.write_due()
            on_change(progress)

        coordinator = Coordinator(
            s,
            ledger,
            run,
            judge,
            changed,
            finish,
            workers=workers,
            identity=Identity(s, self._environment),
            spent=self._spent,
        )
        self._stop = coordinator.stop
        self._renderer.while_waiting = lambda: on_change(coordinator.progress)
        if self._stopped:
            coordinator.stop()
        progress = coordinator.search()
        study.end_run(progress.ended)
        best = tuple(ledger.best(str(target.problem), target.gpu.key, top=s.trials, run=run))
        invalid, repeated = coordinator.proposer.invalid, coordinator.proposer.repeated
        return SearchResult(run, progress, best, invalid, repeated, study.all_missed, pareto=len(s.objectives) > 1)


def finisher(ledger: Ledger, study: Projection, on_trial: OnTrial | None) -> Callable[[int], None]:
    """Return a function that passes a finished trial to the study and to `on_trial`."""

    def finish(trial: int) -> None:
        study.add(trial)
        if on_trial:
            on_trial(ledger.candidate(trial))

    return finish


def _setting(
    options: SearchOptions, target: Target, objectives: tuple[Objective, ...], timed: bool, jobs: int, fill: Fill
) -> Setting:
    space, templates = prepare_space(options.space, options.templates, target, not timed, fill, options.families)
    return Setting(
        target,
        space,
        templates,
        options.sampler or samplers.DEFAULT,
        seed=drawn_seed(options.seed),
        trials=options.trials or DEFAULT_TRIALS,
        seconds=options.minutes * 60 if options.minutes else None,
        jobs=jobs,
        timed=timed,
        objectives=objectives,
        fill=fill,
        remeasure=options.remeasure,
    )


def require_several(objective: str, sampler: str) -> None:
    """Raise UsageError if the sampler supports only one objective."""
    if samplers.SAMPLERS[sampler].single_objective:
        able = ", ".join(name for name, declared in samplers.SAMPLERS.items() if not declared.single_objective)
        raise UsageError(f"the sampler {sampler} supports only one objective; for several use {able}")


def concurrent_searches(ledger: Ledger, run: int) -> str | None:
    """Return a sentence if other searches of the same target are running, else None."""
    runs = ledger.runs()
    this = next(r for r in runs if r.id == run)
    others = [str(r.id) for r in runs if r.status == RUNNING and r.id != run and _same_target(r, this)]
    if not others:
        return None
    named = f"run {others[0]} is" if len(others) == 1 else f"runs {', '.join(others)} are"
    return f"{named} searching the same problem: each kernel is evaluated by one search, and the others wait for it"


def _same_target(one: Run, other: Run) -> bool:
    return (one.problem, one.gpu) == (other.problem, other.gpu)


def _announce(
    setting: Setting,
    choice: Choice,
    timing: GpuDevice | None,
    unpredictable: str | None,
    place: str,
    run: int,
    echo: Echo,
) -> None:
    s, space, target = setting, setting.space, setting.target
    gpu, named = target.gpu, choice.gpu
    if choice.why:
        echo(choice.why)
    work = f" · {target.flops / 1e9:,.4g} GFLOP" if target.flops else ""
    echo(f"evoengine {__version__} · {gpu.key} ({gpu.arch}) · {target.problem}{work}")
    if timing:
        other = f", by its limits; --gpu names {named.name}, of the same {named.arch}"
        echo(f"gated and timed on {timing.name}{other if timing.name != named.name else ''}")
    else:
        at = f"by times predicted from the machine code at the {target.clock} clock"
        how = "by the formula of each family" if unpredictable else at
        echo(f"no {gpu.key} to time on: compiled for {gpu.arch}, gated on the CPU, ranked {how}")
    if unpredictable:
        echo(f"no predictions: {unpredictable}")
    families = [f for f in space.families if f not in space.empty_families]
    plural = "family" if len(families) == 1 else "families"
    echo(
        f"space {space.name}: {len(families)} {plural}, {len(space):,} valid of {space.size:,} · sampler {s.sampler} · "
        f"seed {s.seed} · {s.jobs} {'worker' if s.jobs == 1 else 'workers'} · ledger {place}, run {run}"
    )
    for family, why in space.empty_families.items():
        echo(f"left out: family {family}: {why}")
    points = space.starts or first_of_each_family(space)
    for knob in inert_knobs(target, space, points, s.templates, s.fill):
        echo(f"inert: {knob} changes no kernel around the start points; use it in a template or remove it")
