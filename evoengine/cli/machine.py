"""evoengine problems, gpus, doctor, cubins and cluster: workloads, GPUs, this machine, binaries and clusters"""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import click

from evoengine.cli.options import CheckedGroup, OneOf, cluster_option, complete_gpu, json_option
from evoengine.cli.output import display, print_json, say
from evoengine.errors import MachineError, NothingFound, UsageError
from evoengine.gpu import AUTO, known_gpus
from evoengine.text import plain_lines
from evoengine.tuning.doctor import check_machine


@click.command()
@json_option
def problems(as_json: bool) -> None:
    """List the built-in workloads with the syntax of their problems and an example of each."""
    from evoengine.views.boards import workloads_json, workloads_table

    if as_json:
        print_json(workloads_json())
    else:
        display(workloads_table())


@click.command()
@json_option
def gpus(as_json: bool) -> None:
    """List the supported GPUs with their limits and peaks, and the kernel families that fit them.

    Peaks are from data sheets: dense fp16 tensor operations with FP32 accumulation. For other boards, pass --gpu-file
    to search or verify: a TOML file with one table as in evoengine/gpus.toml.
    """
    from evoengine.views.boards import boards_json, gpus_remarks, gpus_table, known_boards

    known = known_boards()
    if as_json:
        print_json(boards_json(known))
        return
    display(gpus_table(known.gpus, known.fitting))
    for line in gpus_remarks(known):
        say(line)


@click.command()
@json_option
def doctor(as_json: bool) -> int:
    """Check what this machine has and what is missing, with remedies. The exit code is 3 if a search cannot run."""
    from evoengine.views.boards import findings_json, findings_table

    found = check_machine()
    able = all(f.here for f in found if f.needed)
    if as_json:
        print_json(findings_json(able, found))
    else:
        display(findings_table(found))
        times = all(f.here for f in found if f.name in ("GPU", "CUDA versions"))
        how = "times candidates on the GPU" if times else "gates on the CPU and ranks by estimate"
        say(f"a search here {how}" if able else "a search cannot run here until the marked items are fixed")
    return 0 if able else MachineError.exit_code


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--arch", type=click.IntRange(min=10), metavar="NUMBER", help="List only kernels for this architecture, such as 90."
)
@click.option(
    "--entry", metavar="NAME", help="Print the machine code of this kernel for --arch, or for the newest architecture."
)
@json_option
def cubins(file: Path, arch: int | None, entry: str | None, as_json: bool) -> None:
    """List the kernels in a cubin, a fatbin, an object or a library, with what each needs at launch.

    The file is parsed and never loaded: nothing in it is executed. Sizes are in bytes.
    """
    from evoengine.views.foreign_kernels import cubins_json, cubins_table
    from evoengine.virtual.cubin_file import kernels_in, listing_of

    if entry is not None:
        if as_json:
            raise UsageError("--entry prints text; leave --json out")
        click.echo(plain_lines(listing_of(file, entry, arch)))
        return
    found = [kernel for kernel in kernels_in(file) if arch in (None, kernel.arch)]
    if not found:
        of = f" for sm_{arch}" if arch else ""
        raise NothingFound(f"{file} holds no machine code of a kernel{of}")
    if as_json:
        print_json(cubins_json(file, found))
    else:
        display(cubins_table(found))


@click.group(cls=CheckedGroup)
def cluster() -> None:
    """Write the files of a Ray cluster that runs searches, inspect it, or describe this machine's GPUs for one."""


@cluster.command()
@cluster_option(default=AUTO)
@json_option
def status(cluster: str, as_json: bool) -> None:
    """List the nodes of a cluster with their versions, and the current task of each GPU."""
    from evoengine.tuning.detached import cluster_status
    from evoengine.views.boards import cluster_json, cluster_remarks, nodes_table

    found = cluster_status(cluster)
    if as_json:
        print_json(cluster_json(found))
        return
    display(nodes_table(found))
    for line in cluster_remarks(found):
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


@cluster.command()
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--slurm", is_flag=True, help="Write a script for sbatch: one job, whose nodes form the cluster.")
@click.option(
    "--k8s", is_flag=True, help="Write objects for KubeRay: a permanent cluster, and a job with a cluster of its own."
)
@click.option(
    "--gpu",
    type=OneOf(sorted(known_gpus())),
    default="h100",
    show_default=True,
    shell_complete=complete_gpu,
    help="Kind of GPU that the nodes have.",
)
@click.option(
    "--nodes", type=click.IntRange(1, 10000), default=2, show_default=True, help="Number of nodes, or its maximum."
)
@click.option("--gpus", type=click.IntRange(0, 64), default=8, show_default=True, help="GPUs of each node.")
@click.option("--cpus", type=click.IntRange(2, 1024), default=64, show_default=True, help="CPUs of each node.")
@click.option("--image", metavar="IMAGE", help="With --k8s: image of the pods (deploy/Containerfile, target ray-node).")
def up(folder: Path, slurm: bool, k8s: bool, gpu: str, nodes: int, gpus: int, cpus: int, image: str | None) -> None:
    """Write the files that start a Ray cluster for searches, for Slurm or for Kubernetes.

    Nothing is submitted, and no existing file is overwritten. docs/fleet.md states the requirements.
    """
    from evoengine.tuning.ray_cluster import KUBERNETES, SLURM, Cluster, write_files

    if slurm == k8s:
        raise UsageError("cluster up needs one of --slurm and --k8s")
    if k8s == (image is None):
        raise UsageError("--k8s requires --image REGISTRY/evoengine:TAG, the image of its pods; --slurm takes none")
    written = write_files(folder, KUBERNETES if k8s else SLURM, Cluster(gpu, nodes, gpus, cpus, image))
    say(f"wrote {', '.join(path.name for path in written)} to {folder}")
    place = shlex.quote(str(folder))
    say(
        f"next: kubectl apply -f {place}/access.yaml -f {place}/cluster.yaml"
        if k8s
        else f"next: sbatch {place}/search.sh"
    )
