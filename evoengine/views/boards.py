"""Workloads, GPUs, and what a machine or a Ray cluster has, as JSON and tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from typing_extensions import TypedDict

from evoengine.errors import MachineError
from evoengine.gpu import Gpu, known_gpus
from evoengine.tuning.doctor import Finding
from evoengine.tuning.ray_cluster import ClusterStatus, Node
from evoengine.views import SCHEMA, AnswerView
from evoengine.views.tables import Cell, Column, Styled, Table
from evoengine.workloads import workloads
from evoengine.workloads.base import AnyWorkload

if TYPE_CHECKING:
    from evoengine.tuning.boards import Fitting

KB = 1024


# ── workloads ───────────────────────────────────────────────────────────────────────────────────────────────────────


class WorkloadView(TypedDict):
    """A workload with the syntax of its problems and an example of one."""

    workload: str
    grammar: str
    example: str


class WorkloadsView(AnswerView):
    """Describe what `evoengine problems --json` prints."""

    workloads: Sequence[WorkloadView]


def workloads_json() -> WorkloadsView:
    known = workloads().values()
    listed: list[WorkloadView] = [{"workload": w.name, "grammar": w.grammar, "example": _example(w)} for w in known]
    return {"schema": SCHEMA, "workloads": listed}


def workloads_table() -> Table:
    columns = [Column("workload"), Column("problem", least=20, folds=True), Column("example", least=20, folds=True)]
    return Table(columns, [[w.name, f"{w.name}:{w.grammar}", _example(w)] for w in workloads().values()])


def _example(workload: AnyWorkload) -> str:
    return str(workload.parse(workload.example))


# ── GPUs ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class BoardView(TypedDict):
    """A GPU: sizes in bytes, clock in GHz, peaks in TFLOPS and GB/s.

    `families` and `left_out` are by workload. `compiles` is null without a compiler.
    """

    key: str
    name: str
    arch: str
    sms: int
    clock_ghz: float
    tensor_tflops: float
    fp32_tflops: float
    memory_gbs: float
    shared_per_block: int
    shared_per_sm: int
    registers_per_sm: int
    threads_per_sm: int
    blocks_per_sm: int
    capability: int
    families: Mapping[str, Sequence[str]]
    left_out: Mapping[str, Mapping[str, str]]
    compiles: bool | None
    predicted_by: str


class BoardsView(AnswerView):
    """Describe what `evoengine gpus --json` prints."""

    gpus: Sequence[BoardView]


@dataclass(frozen=True, slots=True)
class KnownBoards:
    """The supported GPUs, with the families that fit each and the capabilities that the compiler here can target."""

    gpus: Sequence[Gpu]
    fitting: Mapping[str, Sequence[Fitting]]
    compiled: Sequence[int] | None
    """None without a compiler"""


def known_boards() -> KnownBoards:
    from evoengine.stages.toolchain import compiled_capabilities
    from evoengine.tuning.boards import fitting_families

    known = list(known_gpus().values())
    try:
        compiled = compiled_capabilities()
    except MachineError:
        compiled = None
    return KnownBoards(known, fitting_families(known), compiled)


def boards_json(known: KnownBoards) -> BoardsView:
    return {"schema": SCHEMA, "gpus": [_board(gpu, known.fitting[gpu.key], known.compiled) for gpu in known.gpus]}


def _board(gpu: Gpu, fitting: Sequence[Fitting], compiled: Sequence[int] | None) -> BoardView:
    from evoengine.sass.chip import why_unmodelled

    stated: dict[str, Any] = {name.removeprefix("gpu."): value for name, value in gpu.variables().items()}
    stated |= {
        "families": {f.workload: f.families for f in fitting},
        "left_out": {f.workload: f.left_out for f in fitting if f.left_out},
        "compiles": None if compiled is None else gpu.capability in compiled,
        "predicted_by": "formula" if why_unmodelled(gpu) else "model",
    }
    return cast("BoardView", stated)


def gpus_table(known: Iterable[Gpu], fitting: Mapping[str, Sequence[Fitting]]) -> Table:
    """Return a table with one GPU per line. In a narrow terminal the names are left out first."""
    columns = [Column("GPU"), Column("name", leaves=9), Column("arch"), Column("SMs", right=True)]
    numbers = ("GHz", "GB/s", "KB per block", "KB per SM")
    columns += [Column(name, right=True, leaves=n) for n, name in zip((4, 0, 3, 2), numbers, strict=True)]
    columns += [Column("TFLOPS", right=True), Column("fit", least=6, folds=True)]
    rows = [
        [
            gpu.key,
            gpu.name.removeprefix("NVIDIA "),
            gpu.arch,
            str(gpu.sms),
            f"{gpu.clock_ghz:.2f}",
            f"{gpu.memory_gbs:g}",
            str(gpu.shared_per_block // KB),
            str(gpu.shared_per_sm // KB),
            f"{gpu.tensor_tflops:g}",
            _fitting_text(fitting[gpu.key]),
        ]
        for gpu in known
    ]
    return Table(columns, rows)


def _fitting_text(fitting: Sequence[Fitting]) -> str:
    """Return "all", or the families that do not fit."""
    left_out = dict.fromkeys(family for f in fitting for family in f.left_out)
    return f"not {', '.join(left_out)}" if left_out else "all"


def gpus_remarks(known: KnownBoards) -> list[str]:
    """Return the lines below the table: the families, why some do not fit, and what the compiler cannot target."""
    by_workload: dict[str, dict[str, None]] = {}
    reasons: dict[str, None] = {}
    for row in known.fitting.values():
        for f in row:
            by_workload.setdefault(f.workload, {}).update(dict.fromkeys((*f.families, *f.left_out)))
            reasons |= {f"{family} left out: {why}": None for family, why in f.left_out.items()}
    listed = "; ".join(f"{workload}: {', '.join(families)}" for workload, families in by_workload.items())
    lines = [f"families of {listed}", *reasons]
    others = [gpu.key for gpu in known.gpus if known.compiled is not None and gpu.capability not in known.compiled]
    if others:
        lines.append(f"the compiler here cannot compile for {', '.join(others)}")
    return lines


# ── a machine ───────────────────────────────────────────────────────────────────────────────────────────────────────


class FindingsView(AnswerView):
    """Describe what `evoengine doctor --json` prints; `able` is whether a search can run."""

    able: bool
    findings: Sequence[Finding]


def findings_json(able: bool, found: Sequence[Finding]) -> FindingsView:
    return {"schema": SCHEMA, "able": able, "findings": found}


def findings_table(found: Iterable[Finding]) -> Table:
    """Return the findings as a table, with a remedy for each that is missing."""
    rows: list[list[Cell]] = []
    for f in found:
        mark = Styled("✓", "green") if f.here else Styled("✗", "red" if f.needed else "yellow")
        rows.append([mark, f.name, f.what])
        if not f.here:
            rows.append(["", "", f"→ {f.remedy}"])
    return Table([Column(""), Column(""), Column("", least=20, folds=True)], rows)


class ClusterView(ClusterStatus, AnswerView):
    """Describe what `evoengine cluster status --json` prints."""


def cluster_json(found: ClusterStatus) -> ClusterView:
    return {"schema": SCHEMA, **found}


def nodes_table(found: ClusterStatus) -> Table:
    columns = [Column("node"), Column("address", leaves=2), Column("CPUs", right=True), Column("GPUs", folds=True)]
    columns += [Column("evoengine"), Column("Python", leaves=1), Column("compiler", leaves=3)]
    rows = [
        [
            node.host,
            node.address,
            str(node.cpus),
            _gpus_text(node),
            node.evoengine or "none",
            node.python,
            node.compiler or "none",
        ]
        for node in found["nodes"]
    ]
    return Table(columns, rows)


def _gpus_text(node: Node) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in node.gpus.items()) or "none"


def cluster_remarks(found: ClusterStatus) -> list[str]:
    """Return lines on the resources in use, the task of each GPU, and the nodes that no search can use."""
    lines = ["{cpus_busy:g} of {cpus:g} CPUs and {gpus_busy:g} of {gpus:g} GPUs are in use".format_map(found)]
    for gpu in found["at_work"]:
        doing = f"{gpu.task} for {gpu.seconds:.0f} s" if gpu.task else f"idle for {gpu.seconds:.0f} s"
        lines.append(f"{gpu.kind} on {gpu.host} ({gpu.device}, {gpu.uuid}): {gpu.label}: {doing}")
    for search in found["searches"]:
        gpus = ", ".join(search.gpus)
        lines.append(f"{search.name} from {search.host}: {gpus} · {search.problem} · {search.done}/{search.total}")
    lines += [f"no search can use {node.host}: it has {node.why_unfit}" for node in found["nodes"] if node.why_unfit]
    return lines
