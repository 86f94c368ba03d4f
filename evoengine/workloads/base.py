"""The Workload protocol: the interface between the engine and a kernel that can be tuned.

A workload has two halves. `Workload` needs no tensor library: problems, costs, the gate's cases, the kernel's
parameters. `Tensors` draws inputs and judges outputs, with torch; only processes that run candidates import it. Both
are pickled for those processes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from evoengine.devices.base import ConstantArgument, ConstantParameter, Parameter, viewed
from evoengine.gpu import Gpu
from evoengine.records import Config, Launch, Plan, Value
from evoengine.sass.chip import DEFAULT as DEFAULT_CLOCK
from evoengine.sass.chip import Clock

if TYPE_CHECKING:
    import numpy as np
    import torch

    from evoengine.devices.pool import BlockLaunch, BlockTrace, RunBlocks
    from evoengine.workloads.coverage import Cell
    from evoengine.workloads.packages import PackageBaseline

Inputs = Mapping[str, "torch.Tensor"]
"""tensors by the names of the kernel's parameters"""
Outputs = Mapping[str, "torch.Tensor"]
LaunchOf = Callable[["Problem"], Launch]


class Problem(Protocol):
    """The sizes and dtypes of a computation. Frozen, comparable and hashable by value."""

    def __str__(self) -> str:
        """Return `WORKLOAD:…`, which `Workload.parse` reads back."""
        ...

    def variables(self) -> Mapping[str, Value]:
        """Return the names that a space's expressions and templates may use, with their values."""
        ...


P = TypeVar("P", bound=Problem)
"""a workload's own type of problem"""
C = TypeVar("C")
"""a workload's own type of case at full size"""


@dataclass(frozen=True, slots=True)
class Case(Generic[P]):
    """One test of a candidate: a small problem and a way to draw its inputs.

    `config` is that of the candidate, because some parameters of kernels depend on it, such as tensor maps.
    """

    name: str
    problem: P
    draw: str = "normal"
    config: Config = field(default_factory=dict, hash=False)
    long: bool = False
    """whether it is run only for candidates that may be ranked, because it takes longer than the others"""
    part: str | None = None
    """the part of the problem's own extent that it covers if all of it would take too long"""
    whole: P | None = None
    """the tuned problem, if its cells are known"""
    once: bool = False
    """whether one of the judges without a GPU is sufficient, because the text and its machine code fail it alike"""


AnyCase = Case[Any]
"""a case of a workload that the engine does not know"""


FLOAT32_EPS = 2.0**-23


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The allowed error of an output against the float64 reference.

    By default FlashAttention's rule: `own` times the error of the same computation in the kernel's own dtypes, plus
    `roundings` spacings of the output's dtype at its largest value. If `rtol` or `atol` is given, they apply instead,
    element by element: atol + rtol·|expected|, for a share `matched` of the elements.
    """

    own: float = 2.0
    roundings: float = 1.0
    wide_roundings: float | None = None
    """likewise of outputs in fp32 and fp64; None: as `roundings`"""
    rtol: float | None = None
    atol: float | None = None
    matched: float = 1.0

    def spacings(self, eps: float) -> float:
        """Return how many spacings an output may be off whose dtype has numbers `eps` apart at 1."""
        return self.roundings if self.wide_roundings is None or eps > FLOAT32_EPS else self.wide_roundings


@dataclass(frozen=True, slots=True)
class Drawn:
    """Drawn tensors: `inputs` for the kernel, `expected` for the reference.

    They differ only if a case tests an invariance.
    """

    inputs: Inputs
    expected: Inputs


@dataclass(frozen=True, slots=True)
class Sample(Generic[P]):
    """Part of a whole problem's outputs as a small problem of its own, which float64 can afford."""

    problem: P
    inputs: Inputs
    take: Callable[[Outputs], Outputs]
    """extracts the sample from whole outputs, in the small problem's shapes"""


class Tensors(ABC, Generic[P]):
    """The tensor half of a workload. Tensors are torch's, on the CPU or a GPU, by the names of the parameters."""

    independent: frozenset[str] = frozenset()
    """draws for which the errors of different rows are independent, so that their sums can be judged too"""

    @abstractmethod
    def draw(self, case: Case[P], seed: int, device: str = "cpu") -> Drawn:
        """Draw the inputs of a case; the same seed gives the same tensors."""

    def changed_in_part(self, case: Case[P], inputs: Inputs, seed: int) -> Inputs | None:
        """Return the inputs with some elements drawn again, or None if that may make them invalid."""
        return None

    @abstractmethod
    def reference(self, problem: P, inputs: Inputs) -> Outputs:
        """Return the outputs in float64 from the same (already rounded) inputs."""

    @abstractmethod
    def own_dtype(self, problem: P, inputs: Inputs) -> Outputs:
        """Return the outputs of a straightforward implementation in the kernel's own dtypes.

        Its error is the gate's measure.
        """

    def nudged(self, case: Case[P], inputs: Inputs) -> Outputs | None:
        """Return float64 outputs that are off by as much as float32 alone may cause; None if unknown.

        Inputs are each half a spacing off, or sums have the deviation that the roundings of their terms have. An
        integer output is not compared if it differs.
        """
        return None

    def rounded_once(self, problem: P, inputs: Inputs) -> Outputs:
        """Return the best result of a correct kernel: float32 throughout, rounded where necessary.

        It is used for `independent` draws.
        """
        raise NotImplementedError

    def shown(self, case: Case[P], drawn: Drawn) -> frozenset[Cell]:
        """Return the cells that a case visits by the values it drew."""
        return frozenset()

    def baselines(self, problem: P) -> tuple[str, ...]:
        """Return the names of a library's implementations that are timed in turns with candidates."""
        return ()

    def baseline(self, name: str, problem: P, inputs: Inputs) -> Callable[[], object]:
        """Return a call of that implementation.

        The call raises RuntimeError if the library does not support the problem.
        """
        raise NotImplementedError

    def outputs_of(self, problem: P, found: Any) -> Outputs:
        """Return by name, in the shapes of the kernel's outputs, what a call of `baseline` returned.

        They are compared with the reference before the baseline is timed. Those that it does not compute are left out.
        """
        return {}

    def package_baselines(self) -> tuple[PackageBaseline[P], ...]:
        """Return kernels of packages that need not be installed, which are baselines where they are."""
        return ()

    def as_baselines_see(self, problem: P, inputs: Inputs) -> Inputs:
        """Return the inputs for which a baseline's outputs are right, if it computes some of the inputs itself."""
        return inputs

    def library(self, problem: P, inputs: Inputs) -> Outputs:
        """Return all outputs of a whole problem computed by a library.

        Each row of a candidate's output is compared with them on a GPU.
        """
        return self.own_dtype(problem, inputs)

    def samples(self, problem: P, inputs: Inputs, seed: int) -> Sequence[Sample[P]]:
        """Return the parts of a whole problem that are compared in float64 on a GPU.

        This is all of it unless it takes too long.
        """
        return (Sample(problem, inputs, lambda outputs: outputs),)

    def check_bytes(self, problem: P) -> int:
        """Return the GPU memory in bytes for drawing inputs and checking outputs, in addition to both."""
        return 0


@dataclass(frozen=True, slots=True)
class IndexBound:
    """Bounds of an input's elements, 0 to `most`, which the loader of an exported kernel checks.

    With `lengths`, the name of an input, only the first ⌈length / page⌉ elements of each row count. With `rising`, no
    element is less than the previous one.
    """

    tensor: str
    most: int
    lengths: str | None = None
    page: int | None = None
    rising: bool | None = None


Grouped = tuple[Any, "BlockLaunch"]
"""a case at full size, and groups of its blocks"""


class FullSize(ABC, Generic[C]):
    """Cases at full size on the CPU: blocks of the problem itself, over tensors that exist in part."""

    unknown_cost = False
    """whether the duration of a block is unknown, so that one block is run before the others"""

    @abstractmethod
    def draw_blocks(self, case: C, launch: Launch, seed: int) -> BlockLaunch | None:
        """Return what to run; None if another case of the plan covers it.

        Raises KernelUnbuildable if a tensor map of the whole problem breaks a rule.
        """

    @abstractmethod
    def written_parts(self, case: C, asked: BlockLaunch, traces: Sequence[BlockTrace]) -> list[WrittenPart]:
        """Return what the blocks wrote, as small problems.

        Raises WrongBlock if it cannot be correct for any values.
        """

    def needs_others(self, case: C) -> bool:
        """Return whether a single block of a correct kernel may be wrong."""
        return False

    def alone(self, case: C, seed: int) -> BlockLaunch | None:
        """Return the blocks of a small launch, each run by itself, if a kernel's blocks may need one another."""
        return None

    def groups(self, case: C, launch: Launch, seed: int) -> Iterator[tuple[Grouped, Grouped]]:
        """Yield groups of blocks that may share tiles through memory: of a small launch, and of this one.

        Where those of the small launch do what they should, those of this one must.
        """
        return iter(())

    def chained(
        self, case: C, launch: Launch | None, seed: int, run: RunBlocks, seconds: float
    ) -> tuple[list[WrittenPart], int]:
        """Return what blocks of the last of several kernels wrote, each behind all blocks that store what it reads.

        Of the launch, or of a small one if there is none. With it the number of those blocks; nothing and 0 where it is
        not known which others they need, or where these take longer than `seconds` of CPU time. Raises WrongBlock.
        """
        return [], 0

    def in_small(self, case: C) -> C:
        """Return the case of the launch of `alone`."""
        return case


class WrongBlock(Exception):
    """A block's stores cannot be correct for any values. The message names the block and what it did."""


class NothingWritten(WrongBlock):
    """No block wrote any of `output`, which is wrong unless the kernel's blocks need one another."""

    def __init__(self, message: str, output: str) -> None:
        super().__init__(message)
        self.output = output


@dataclass(frozen=True, slots=True)
class WrittenPart:
    """Outputs that blocks wrote, as a small problem of their own."""

    case: AnyCase
    drawn: Drawn
    outputs: Outputs
    expected: Outputs | None = None
    """the expected outputs in float64, if they are known"""


@dataclass(frozen=True, slots=True)
class Host:
    """A user's Python file that launches a Triton kernel by a function of its own.

    Grid, arguments and reference are known only from running it, which worker processes do.
    """

    file: str
    """its path in messages and line tables"""
    text: str
    kernel: str
    call: str
    """function that launches the kernel on tensors of its own; its integer parameters are sizes"""
    reference: str | None
    """function that takes parameters of the kernel by name and returns what it writes"""


class Workload(ABC, Generic[P]):
    """A kernel that can be tuned, without its tensors. Instances are picklable and immutable."""

    name: str
    """name of the workload, prefix of its problems' texts, and name of its templates and its space file"""
    grammar: str
    """the grammar of a problem's text, for the user"""
    example: str
    """the text of a problem, which is the default"""
    compile_time: tuple[str, ...]
    """the problem's variables that a template may use as constants; all others are parameters of the kernel"""
    tolerance: Tolerance = Tolerance()
    is_default: bool = False
    """whether problems without a name before the colon belong to this workload"""
    baseline_label: str = "baseline"
    """the usual name of the baselines"""
    definition_text: str | None = None
    """the definition of a user's own kernel as JSON, which ledgers store"""
    host: Host | None = None
    """the program that launches candidates, if only it knows their launches and arguments"""

    def __eq__(self, other: object) -> bool:
        """Compare types and attributes, as a worker process unpickles a workload with each task."""
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(type(self))

    @abstractmethod
    def parse(self, text: str) -> P:
        """Parse a problem, which may begin with `NAME:`.

        Raises UsageError naming the part that is wrong and what would be right.
        """

    @abstractmethod
    def flops(self, problem: P) -> float:
        """Return the number of operations, counted as is usual in the field, so that figures are comparable."""

    @abstractmethod
    def min_dram_bytes(self, problem: P) -> float:
        """Return the device-memory traffic in bytes that no kernel can avoid."""

    @abstractmethod
    def cases(self, problem: P, config: Config) -> tuple[Case[P], ...]:
        """Return the gate's cases: small problems chosen against the config's tiles.

        They share the compile-time part of `problem`.
        """

    @abstractmethod
    def parameters(self, problem: P, config: Config) -> tuple[Parameter, ...]:
        """Return all of the kernel's parameters in order: tensors by shape, scalars by value, tensor maps.

        The tensors are the same for every config, including an empty one.
        """

    def constants(self, problem: P) -> dict[str, Value]:
        """Return the compile-time values of a problem by name: a template sees them, a text's first line lists them."""
        values = problem.variables()
        return {name: values[name] for name in self.compile_time}

    def problem_sets(self) -> Mapping[str, tuple[str, ...]]:
        """Return sets of problems that are tuned together, by name."""
        return {}

    def at_run_time(self, problem: P) -> P | None:
        """Return the problem with a Symbol in place of each size that an exported kernel receives at run time.

        What `parameters` computes from it holds for all sizes. None if the kernel supports only one size.
        """
        return None

    def size_rules(self, problem: P) -> list[tuple[str, str]]:
        """Return expressions that the Symbols of such a problem must satisfy, each with the reason."""
        return []

    def kernel_parameters(self, entry: str) -> tuple[str, ...] | None:
        """Return the names of the parameters of one of several kernels, in order; None for all parameters."""
        return None

    def indices(self, problem: P, config: Config, seed: int) -> Mapping[str, np.ndarray]:
        """Return contents [bytes uint8] of inputs on which the work of a kernel depends: indices, orders of tiles."""
        return {}

    def index_bounds(self, problem: P) -> tuple[IndexBound, ...]:
        """Return the bounds of inputs by which a kernel finds elements of others, each after those it depends on."""
        return ()

    @abstractmethod
    def tensors(self) -> Tensors[P]:
        """Return the half that imports torch."""

    def cells(self, problem: P, config: Config) -> frozenset[Cell]:
        """Return the distinct behaviours of a kernel of this configuration, all of which the gate's cases must visit.

        Empty if they are not known.
        """
        return frozenset()

    def visited(self, case: Case[P], launch: Launch, visits: np.ndarray) -> frozenset[Cell]:
        """Return the cells that a case visits by its sizes and by the device's counts, VISIT [n]."""
        return frozenset()

    def gate_launch(self, case: Case[P], launch: Launch) -> Launch:
        """Return the launch of a case: that of the space, unless a kernel must be correct with others too."""
        return launch

    def full_plan(self, problem: P, config: Config, launch_of: LaunchOf) -> Plan:
        """Return cases at full size with their launches; none unless the workload defines some."""
        return ()

    def full_size(self) -> FullSize[Any]:
        """Return the half for cases of `full_plan` that imports torch."""
        raise NotImplementedError

    @property
    def entry(self) -> str:
        """Return the kernel's name in its source: an `extern "C" __global__` function."""
        return self.name

    def loader(self) -> Path | None:
        """Return a file to ship with an exported kernel that calls it; None for the common loader."""
        return None

    def source_text(self, problem: P, config: Config, gpu: Gpu) -> str | None:
        """Return the text of a candidate that is not made from a template; None if it is."""
        return None

    def space_file(self) -> Path | None:
        """Return the default search space; None for `search_spaces/NAME.toml`."""
        return None

    def space_text(self) -> str | None:
        """Return the default search space if it is in no file."""
        return None

    def templates(self) -> Path | None:
        """Return the folder that holds `FAMILY.cu.j2`; None for `templates/NAME`."""
        return None


AnyWorkload = Workload[Any]
"""a workload of unknown problem type; the engine passes a workload's objects only back to the same workload"""


class Named(Protocol):
    """A parameter or an argument of any kind."""

    @property
    def name(self) -> str: ...


N = TypeVar("N", bound=Named)


def taken(workload: AnyWorkload, entry: str, given: Sequence[N]) -> Sequence[N]:
    """Return those of a candidate's parameters, or arguments, that one of its kernels takes.

    They are followed by those that are only accessed through its tensor maps and structs, which are not passed, and by
    the constants.
    """
    names = workload.kernel_parameters(entry)
    if names is None:
        return given
    by_name = {one.name: one for one in given}
    own = [_passed(by_name[name], True) for name in names]
    seen = dict.fromkeys(name for one in own for name in viewed(one) if name not in names)
    constants = [one for one in given if isinstance(one, (ConstantArgument, ConstantParameter))]
    return [*own, *(_passed(by_name[name], False) for name in seen), *constants]


def _passed(one: N, passed: bool) -> N:
    """Return the parameter or argument with its mark `passed` set, if it has one."""
    if getattr(one, "passed", passed) == passed:
        return one
    changed: N = replace(one, passed=passed)  # type: ignore[type-var]
    return changed


@dataclass(frozen=True, slots=True)
class Target:
    """The problem and the GPU to tune for; `clock` is that of predicted times."""

    workload: AnyWorkload
    problem: Problem
    gpu: Gpu
    clock: Clock = DEFAULT_CLOCK

    @property
    def flops(self) -> float:
        return self.workload.flops(self.problem)

    @property
    def min_dram_bytes(self) -> float:
        return self.workload.min_dram_bytes(self.problem)

    def __str__(self) -> str:
        return f"{self.problem} on {self.gpu.key}"
