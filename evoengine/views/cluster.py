"""The nodes of a Ray cluster and what they do, as JSON and as a table."""

from __future__ import annotations

from collections.abc import Sequence

from evoengine.tuning.detached import BusyGpu, ClusterStatus, DetachedStatus
from evoengine.tuning.ray_cluster import Node
from evoengine.views.encoding import SCHEMA, AnswerView
from evoengine.views.tables import Column, Table


class ClusterView(AnswerView):
    """What `evoengine cluster status --json` prints; `cpus_busy` and `gpus_busy` count what anybody holds."""

    nodes: Sequence[Node]
    cpus: float
    cpus_busy: float
    gpus: float
    gpus_busy: float
    at_work: Sequence[BusyGpu]
    searches: Sequence[DetachedStatus]


def cluster_json(found: ClusterStatus) -> ClusterView:
    return {
        "schema": SCHEMA,
        "nodes": found.nodes,
        "cpus": found.cpus,
        "cpus_busy": found.cpus_busy,
        "gpus": found.gpus,
        "gpus_busy": found.gpus_busy,
        "at_work": found.at_work,
        "searches": found.searches,
    }


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
        for node in found.nodes
    ]
    return Table(columns, rows)


def _gpus_text(node: Node) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in node.gpus.items()) or "none"


def cluster_remarks(found: ClusterStatus) -> list[str]:
    """Return lines on the resources in use, the task of each GPU, and the nodes that no search can use."""
    lines = [f"{found.cpus_busy:g} of {found.cpus:g} CPUs and {found.gpus_busy:g} of {found.gpus:g} GPUs are held"]
    for gpu in found.at_work:
        doing = f"{gpu.task} for {gpu.seconds:.0f} s" if gpu.task else f"waits for the next, {gpu.seconds:.0f} s"
        lines.append(f"{gpu.kind} on {gpu.host} ({gpu.device}, {gpu.uuid}): {gpu.label}: {doing}")
    for search in found.searches:
        gpus = ", ".join(search.gpus)
        lines.append(f"{search.name} from {search.host}: {gpus} · {search.problem} · {search.done}/{search.total}")
    lines += [f"no search can use {node.host}: it has {node.why_unfit}" for node in found.nodes if node.why_unfit]
    return lines
