"""evoengine cluster"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from evoengine.cli.options import CheckedGroup, cluster_option, json_option
from evoengine.gpu import AUTO

if TYPE_CHECKING:
    from evoengine.cli.tables import Table
    from evoengine.tuning.cluster_status import ClusterStatus
    from evoengine.tuning.ray_cluster import Node


@click.group(cls=CheckedGroup)
def cluster() -> None:
    """Inspect a Ray cluster that runs searches, or describe this machine's GPUs for one."""


@cluster.command()
@cluster_option(default=AUTO)
@json_option
def status(cluster: str, as_json: bool) -> None:
    """List the nodes of a cluster with their versions, and the current task of each GPU."""
    from evoengine.cli.display import say, stdout
    from evoengine.cli.json_output import print_json
    from evoengine.tuning.cluster_status import cluster_status

    found = cluster_status(cluster)
    if as_json:
        print_json(**found.to_json())
        return
    stdout.print(nodes_table(found))
    for line in remarks(found):
        say(line)


@cluster.command()
@click.argument("name")
@cluster_option(default=AUTO)
def stop(name: str, cluster: str) -> None:
    """Stop a search that was started with --detach. Its results so far are kept."""
    from evoengine.tuning.detached import stop

    stop(cluster, name)


@cluster.command()
def resources() -> None:
    """Print this machine's GPUs as JSON for `ray start --resources`: the number of each kind."""
    from evoengine.tuning.ray_cluster import gpu_resources

    click.echo(json.dumps(gpu_resources()))


def nodes_table(found: ClusterStatus) -> Table:
    from evoengine.cli.tables import Column, Table

    columns = [Column("node"), Column("address", leaves=2), Column("CPUs", right=True), Column("GPUs", folds=True)]
    columns += [Column("evoengine"), Column("Python", leaves=1), Column("compiler", leaves=3)]
    rows = [
        [
            node.host, node.address, str(node.cpus), _gpus_text(node),
            node.evoengine or "none", node.python, node.compiler or "none",
        ]
        for node in found.nodes
    ]  # fmt: skip
    return Table(columns, rows)


def _gpus_text(node: Node) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in node.gpus.items()) or "none"


def remarks(found: ClusterStatus) -> list[str]:
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
