"""Choose the target GPU: one that is named, one that a file describes, or the one of this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from evoengine.devices.driver import GpuDevice, find_driver
from evoengine.errors import NothingFound, UsageError
from evoengine.gpu import AUTO, DEFAULT, Gpu, find_gpu, known_gpus
from evoengine.gpu_file import read_gpu_file
from evoengine.ledger.store import Ledger, open_ledger
from evoengine.paths import asset
from evoengine.search.targets import stored_gpu
from evoengine.space.reader import read_definition
from evoengine.workloads import workloads
from evoengine.workloads.base import AnyWorkload


@dataclass(frozen=True, slots=True)
class Fitting:
    """The families of a workload that fit a GPU, by the constraints of its space that depend on the GPU alone."""

    workload: str
    families: tuple[str, ...]
    left_out: Mapping[str, str]
    """family → reason"""


def space_file_of(workload: AnyWorkload) -> Path:
    """Return the workload's own space file, else the one of search_spaces/ with its name."""
    return workload.space_file() or asset("search_spaces") / f"{workload.name}.toml"


def fitting_families(gpus: Iterable[Gpu]) -> dict[str, list[Fitting]]:
    """Return, by the key of each GPU, the families that fit it, for every known workload with a built-in space."""
    gpus = list(gpus)
    found: dict[str, list[Fitting]] = {gpu.key: [] for gpu in gpus}
    for workload in workloads().values() if gpus else ():
        example = workload.parse(workload.example)
        definition = read_definition(space_file_of(workload), {**example.variables(), **gpus[0].variables()})
        for gpu in gpus:
            impossible = definition.impossible_families(gpu.variables())
            families = tuple(str(f) for f in definition.knobs[0].values if f not in impossible)
            found[gpu.key].append(Fitting(workload.name, families, impossible))
    return found


@dataclass(frozen=True, slots=True)
class Choice:
    gpu: Gpu
    why: str | None = None
    """a line for the user if the GPU was not named"""


def choose_gpu(requested: str, file: Path | None, find: Callable[[str], Gpu] = find_gpu) -> Choice:
    """Return the target GPU, and the reason if it was not named. `find` returns a GPU by its name.

    Raises UsageError for an unknown name, and for a file that describes no GPU or another one than `requested`.
    """
    if file is None:
        return _detect() if requested == AUTO else Choice(find(requested))
    gpu = read_gpu_file(file)
    if requested not in (AUTO, gpu.key):
        raise UsageError(
            f"--gpu {requested} contradicts --gpu-file {file}, which describes {gpu.key}; give one of them"
        )
    return Choice(gpu, f"--gpu {gpu.key}: {gpu.name} as {file} describes it")


def find_stored_gpu(db: str | None, name: str) -> Gpu:
    """Return the known GPU of that name, or the board that the ledger stores under it. Raises UsageError."""
    if name.lower() not in known_gpus():
        try:
            with open_ledger(db, create=False) as ledger:
                return stored_gpu(ledger, name)
        except NothingFound:  # no ledger exists yet
            pass
    return find_gpu(name)


def custom_definition(gpu: Gpu) -> dict[str, Any] | None:
    """Return the description of a GPU that gpus.toml does not list, as a run stores it."""
    return None if gpu.key in known_gpus() else asdict(gpu)


def require_same_board(ledger: Ledger, gpu: Gpu) -> None:
    """Raise UsageError if the ledger has other limits under the GPU's name.

    Figures of both would be ranked together.
    """
    if gpu.key in known_gpus() or ledger.targets.gpu_definition(gpu.key) is None:
        return
    own, kept = asdict(gpu), asdict(stored_gpu(ledger, gpu.key))
    for name in own:
        if own[name] != kept[name]:
            raise UsageError(
                f"{gpu.key} has {name} {kept[name]!a} in the ledger and {own[name]!a} in the file; rename the changed "
                "board, or choose another ledger with --db"
            )


def _detect() -> Choice:
    """Return the board of this machine's first GPU listed in gpus.toml, else a similar one, else the default."""
    found = find_driver()
    if isinstance(found, str):
        return Choice(find_gpu(DEFAULT), f"--gpu {DEFAULT}: {found}; evoengine gpus lists the others")
    _, devices = found
    for device in devices:
        if known := next((gpu for gpu in known_gpus().values() if gpu.name == device.name), None):
            return Choice(known, f"--gpu {known.key}: this machine has {device.name}")
    return _nearest_board(devices[0])


def _nearest_board(device: GpuDevice) -> Choice:
    """Return the board of the same architecture with the nearest number of SMs; the default if there is none."""
    here = f"{device.name} (sm_{device.capability}) is not in gpus.toml"
    remedy = "describe it with --gpu-file"
    alike = [gpu for gpu in known_gpus().values() if gpu.capability == device.capability]
    if not alike:
        return Choice(find_gpu(DEFAULT), f"--gpu {DEFAULT}: {here}, nor is a GPU of its architecture; {remedy}")
    sms = device.limits.get("sms", 0)
    nearest = min(alike, key=lambda gpu: abs(gpu.sms - sms))
    why = f"{here}; using the peaks of {nearest.name}, of the same architecture; {remedy}"
    return Choice(nearest, f"--gpu {nearest.key}: {why}")
