"""Write files that start a Ray cluster for searches: a Slurm job, or Kubernetes objects for KubeRay."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import jinja2

from evoengine import __version__
from evoengine.errors import UsageError

TEMPLATES = Path(__file__).with_name("cluster_files")
SLURM, KUBERNETES = ("search.sh",), ("access.yaml", "cluster.yaml", "job.yaml")
RAY = "2.60.0"
"""version in the container file; every node and every client of the cluster has the same"""
IMAGE = re.compile(r"[a-z0-9][\w.-]*(:\d+)?(/[a-z0-9][\w.-]*)*(:[\w][\w.-]{0,127})?(@sha256:[0-9a-f]{64})?\Z")
"""a container image, as Kubernetes takes it"""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Identical nodes of a cluster, as the files request them."""

    gpu: str
    """kind of GPU, a key of gpus.toml"""
    nodes: int
    gpus: int
    """of each node; with 0 it only compiles, gates and predicts"""
    cpus: int
    """of each node"""
    image: str | None = None
    """of Kubernetes' pods: one with evoengine and Ray (deploy/Containerfile, target ray-node)"""


def write_files(folder: Path, names: tuple[str, ...], cluster: Cluster) -> list[Path]:
    """Write the files of these names and return their paths.

    Raises UsageError, with nothing written, where one exists already or cannot be written, or where the image is
    malformed.
    """
    if cluster.image is not None and not IMAGE.match(cluster.image):
        raise UsageError(f"--image {cluster.image!r} is no container image: write REGISTRY/evoengine:TAG")
    texts = {folder / name: text_of(name, cluster) for name in names}
    for path in texts:
        if path.exists() or path.is_symlink():
            raise UsageError(f"{path} is there already: name another folder, or move it away")
    written: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in texts.items():
            with path.open("x", encoding="utf-8") as file:
                written.append(path)
                file.write(text)
            if path.suffix == ".sh":
                path.chmod(0o755)
    except OSError as error:
        for path in written:
            path.unlink(missing_ok=True)
        raise UsageError(f"cannot write to {folder}: {error.strerror}") from error
    return written


def text_of(name: str, cluster: Cluster) -> str:
    """Return the text of one file."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        comment_start_string="<#",
        comment_end_string="#>",  # a shell has `${#array}`
    )
    text = environment.get_template(f"{name}.j2").render(
        version=__version__,
        ray=RAY,
        gpu=cluster.gpu,
        nodes=cluster.nodes,
        gpus=cluster.gpus,
        cpus=cluster.cpus,
        image=cluster.image,
        least=0 if cluster.gpus else 1,
        accelerators=f", nvidia.com/gpu: {cluster.gpus}" if cluster.gpus else "",
    )
    return re.sub(r"\n{2,}(?=\s)|\n{3,}", "\n", text) if name.endswith(".yaml") else text
