"""Find kernels for tensors in the places that a program names: exports, ledgers and servers."""

from __future__ import annotations

import atexit
import importlib.util
import json
import math
import os
import re
import shutil
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import torch

from evoengine.devices.base import TensorParameter
from evoengine.errors import EvoengineError, MachineError, NothingFound, UsageError
from evoengine.gpu import known_gpus
from evoengine.ledger.read import Targets
from evoengine.ledger.store import Ledger, open_ledger
from evoengine.publish.export import CUDA_LAUNCH, LOADER
from evoengine.publish.folder import MARK, TABLE, read_table, write_folder
from evoengine.publish.record import SIGNED_FILE, read_record, require_public_key
from evoengine.search.targets import target_of
from evoengine.tuning.exporting import bundle
from evoengine.workloads import find_workload
from evoengine.workloads.tensors import TORCH_DTYPES

PLACES_VARIABLE = "EVOENGINE_KERNELS"
"""names places where a program calls no `use`, separated as in PATH"""
MOST_CALLS = 10_000
"""combinations of GPU, shapes and dtypes that are remembered; beyond, all are forgotten and chosen again when called"""
MODULE_NAME = re.compile(r"[a-z][a-z0-9_]{0,100}")

Kernel = Callable[..., Any]
"""takes and returns tensors"""
Described = tuple[tuple[int, ...], torch.dtype]
"""shape and dtype of a tensor"""


class NoKernel(UserWarning):
    """No kernel fits the tensors of a call, and torch computes it."""


@dataclass(frozen=True, slots=True)
class Request:
    """The kernel that a call needs.

    `problem` is written as for `evoengine search`, None for a kernel of the user's own. `sizes` are the problem's
    variables that are compiled into a kernel; where they are None, the shapes of all inputs are.
    """

    workload: str
    gpu: str
    inputs: tuple[Described, ...]
    problem: str | None = None
    sizes: Mapping[str, object] | None = None
    wanted: Mapping[str, int] = field(default_factory=dict)
    """sizes that a kernel was tuned for and that a call may change, by the names of the problem's variables"""
    variables: Mapping[str, object] = field(default_factory=dict)
    """variables of the problem that a kernel must have besides, by name"""
    refusal: str = ""
    """why no kernel can serve the call"""


@dataclass(frozen=True, slots=True)
class Offer:
    """A kernel that a place has."""

    variables: Mapping[str, object]
    inputs: tuple[Described, ...]
    median_us: float
    """infinite where it has no figure"""
    load: Callable[[], Kernel]
    origin: str
    folder: Path | None = None
    """that of the export; None in a ledger and on a server"""

    def fits(self, request: Request) -> bool:
        if request.sizes is None and self.inputs != request.inputs:
            return False
        required = {**(request.sizes or {}), **request.variables}
        return all(self.variables.get(name) == value for name, value in required.items())

    def distance(self, request: Request) -> float:
        """Return how far the sizes that it was tuned for are from those of a call: the sum of |ln ratio|."""
        sizes = [(self.variables.get(name), value) for name, value in request.wanted.items()]
        return sum(abs(math.log(max(int(str(own)), 1) / max(value, 1))) for own, value in sizes)


class Place(Protocol):
    def offers(self, request: Request) -> Iterator[Offer]:
        """Yield the kernels of the request's workload and GPU. Raises EvoengineError if the place cannot be read."""
        ...


@dataclass(frozen=True, slots=True)
class Exports:
    """A folder with an exported kernel, or with folders of them."""

    folder: Path

    def offers(self, request: Request) -> Iterator[Offer]:
        for path in sorted([*self.folder.glob(MARK), *self.folder.glob(f"*/{MARK}")]):
            described = read_description(path)
            if described["kernel"] == request.workload and described["provenance"]["gpu"] == request.gpu:
                folder = path.parent
                yield replace(_offer(described, partial(load_folder, folder, described), folder), folder=folder)


@dataclass(frozen=True, slots=True)
class TablePlace:
    """A folder with a dispatch table, whose files were checked against it.

    A size that a call may change lies between the least and the largest of the table; beyond, it has no kernel.
    """

    folders: tuple[Path, ...]

    def offers(self, request: Request) -> Iterator[Offer]:
        found = [offer for folder in self.folders for offer in Exports(folder).offers(request)]
        alike = [offer for offer in found if offer.fits(request)]
        if all(self._within(alike, name, value) for name, value in request.wanted.items()):
            yield from alike

    def _within(self, offers: Sequence[Offer], name: str, value: int) -> bool:
        sizes = [int(str(offer.variables.get(name, value))) for offer in offers]
        return not sizes or min(sizes) <= value <= max(sizes)


@dataclass(frozen=True, slots=True)
class LedgerPlace:
    """A ledger, of which the best kernel of each problem is offered if the gate was finished for it."""

    url: str

    def offers(self, request: Request) -> Iterator[Offer]:
        with open_ledger(self.url, create=False) as ledger:
            for problem in Targets(ledger).problems_of(request.workload, request.gpu):
                found = ledger.best(problem, request.gpu, 1)
                # a Triton kernel is launched by the user's own program
                if found and target_of(ledger, found[0]).workload.host is None:
                    yield self._offer(ledger, found[0].trial)

    def _offer(self, ledger: Ledger, trial: int) -> Offer:
        candidate = ledger.candidate(trial)
        target = target_of(ledger, candidate)
        parameters = target.workload.parameters(target.problem, candidate.config)
        return Offer(
            target.problem.variables(),
            tuple(
                (p.shape, TORCH_DTYPES[p.dtype]) for p in parameters if isinstance(p, TensorParameter) and not p.output
            ),
            candidate.ranked_by.median_us,
            lambda: self._load(trial),
            f"trial {trial} of {self.url}",
        )

    def _load(self, trial: int) -> Kernel:
        with open_ledger(self.url, create=False) as ledger:
            return _load_files(bundle(ledger, trial))


@dataclass(frozen=True, slots=True)
class Server:
    """A service, asked for the best kernel of the very problem."""

    url: str

    def offers(self, request: Request) -> Iterator[Offer]:
        if request.problem is None:
            return
        from evoengine.service.client import Client  # of the extra `client`

        with Client(self.url) as client:
            try:
                best = client.best(request.gpu, request.problem)
            except NothingFound:
                return
            files = client.bundle(str(best["source_sha256"]), request.gpu)
        described = check_description(files.get(MARK, b""), self.url)
        if described["kernel"] == request.workload and described["provenance"]["gpu"] == request.gpu:
            yield _offer(described, lambda: _load_files(_with_own_loader(files, described)), self.url)


_FIELDS = {"module": str, "kernel": str, "problem": dict, "parameters": list, "provenance": dict, "launch": dict}


def read_description(path: Path) -> dict[str, Any]:
    """Return a kernel.json. Raises UsageError for what is none."""
    try:
        return check_description(path.read_bytes(), str(path))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error


def check_description(text: bytes, where: str) -> dict[str, Any]:
    """Return the contents of a kernel.json, which may come from anybody. Raises UsageError for what is none."""
    with suppress(ValueError, RecursionError):
        found = json.loads(text)
        if isinstance(found, dict) and all(isinstance(found.get(name), kind) for name, kind in _FIELDS.items()):
            parameters = found["parameters"]
            if MODULE_NAME.fullmatch(found["module"]) and all(isinstance(p, dict) for p in parameters):
                return found
    raise UsageError(f"{where} is not the kernel.json of an exported kernel; evoengine best --export DIR writes one")


def _offer(described: dict[str, Any], load: Callable[[], Kernel], where: object) -> Offer:
    tensors = [p for p in described["parameters"] if "shape" in p and not p.get("output")]
    try:
        inputs = tuple((tuple(map(int, p["shape"])), TORCH_DTYPES[p["dtype"]]) for p in tensors)
        figure = described.get("figure") or {}
        median_us = float(figure.get("median_us", math.inf))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UsageError(f"kernel.json of {where} describes no tensors of known dtypes: {error}") from error
    return Offer(described["problem"], inputs, median_us, load, str(where))


def load_folder(folder: Path, described: Mapping[str, Any]) -> Kernel:
    """Import the loader of an exported folder and return its function."""
    name = described["module"]
    spec = importlib.util.spec_from_file_location(f"evoengine.torch.loaded.{name}", folder / f"{name}.py")
    if spec is None or spec.loader is None:
        raise UsageError(f"{folder} has no loader {name}.py; export the kernel again")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        kernel: Kernel = getattr(module, described["kernel"].replace("-", "_"))
    except (OSError, ImportError, AttributeError) as error:
        raise UsageError(f"the loader {name}.py in {folder} cannot be used: {error}") from error
    return kernel


def _require_signed(offer: Offer, key: Path) -> None:
    """Raise UsageError unless a record that the public key signed vouches for the machine code of an export."""
    signed = offer.folder and offer.folder / SIGNED_FILE
    if not signed or not signed.is_file():
        raise UsageError(f"the kernel of {offer.origin} has no signed record, which best --export --sign writes")
    binary = read_record(signed, key).contender.binary
    if (signed.parent / "kernel.cubin").read_bytes() != binary.cubin:
        raise UsageError(f"the machine code in {offer.origin} is not that of its signed record")


def _load_files(files: Mapping[str, bytes]) -> Kernel:
    """Write an export's files into a folder of this process, which is removed at its end, and load the kernel."""
    root = Path(tempfile.mkdtemp(prefix="evoengine-kernel-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    folder = root / "export"
    write_folder(folder, {name: data for name, data in files.items() if name != "SHA256SUMS"})
    return load_folder(folder, read_description(folder / MARK))


def _with_own_loader(files: Mapping[str, bytes], described: Mapping[str, Any]) -> dict[str, bytes]:
    """Return binary and description with the loader of this evoengine, so that no server's Python runs here."""
    try:
        loader = find_workload(described["kernel"]).loader() or LOADER
    except UsageError:  # a kernel of a user's own
        loader = LOADER
    own = {f"{described['module']}.py": loader.read_bytes(), "_cuda.py": CUDA_LAUNCH.read_bytes()}
    return {MARK: files[MARK], "kernel.cubin": files.get("kernel.cubin", b""), **own}


def place_of(where: str | os.PathLike[str]) -> Place:
    """Return the place that a path or URL names. Raises UsageError for what is none."""
    text = os.fspath(where)
    if text.startswith(("http://", "https://")):
        if find_spec("httpx2") is None:
            raise MachineError(f"{text} is asked by httpx2, which is not installed: pip install 'evoengine[client]'")
        return Server(text)
    if (Path(text) / TABLE).is_file():
        return TablePlace(tuple(read_table(Path(text))))
    if Path(text).is_dir():
        return Exports(Path(text))
    with open_ledger(text, create=False):
        return LedgerPlace(text)


class Kernels:
    """The places of a process, and what was chosen from them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._places: Sequence[Place] | None = None
        self._key: Path | None = None
        self.chosen: dict[object, Kernel | None] = {}
        """by a call's GPU, shapes and dtypes; None if torch computes it"""
        self.origins: dict[object, str] = {}
        """where each kernel comes from, or why there is none"""

    def use(self, places: Sequence[Place], key: Path | None = None) -> None:
        with self._lock:
            self._places, self._key = places, key
            self.chosen.clear()
            self.origins.clear()

    def choose(self, key: object, request: Request) -> Kernel | None:
        """Return the kernel for a call and remember it under `key`; None, said once, where torch has to compute it."""
        with self._lock:
            if key not in self.chosen:
                if len(self.chosen) >= MOST_CALLS:
                    self.chosen.clear()
                    self.origins.clear()
                self.chosen[key], self.origins[key] = self._find(request)
                if self.chosen[key] is None:
                    warnings.warn(f"torch computes {_shown(request)}: {self.origins[key]}", NoKernel, stacklevel=3)
            return self.chosen[key]

    def _find(self, request: Request) -> tuple[Kernel | None, str]:
        if request.refusal:
            return None, request.refusal
        if not request.gpu:
            return None, "its tensors are on no GPU that evoengine knows"
        if self._places is None:
            named = os.environ.get(PLACES_VARIABLE, "")
            self._places = [place_of(name) for name in named.split(os.pathsep) if name]
        if not self._places:
            return None, f"no place to find kernels is named; call evoengine.torch.use(…) or set {PLACES_VARIABLE}"
        reasons = []
        for place in self._places:
            try:
                fitting = [offer for offer in place.offers(request) if offer.fits(request)]
                if fitting:
                    best = min(fitting, key=lambda offer: (offer.distance(request), offer.median_us))
                    if self._key:
                        _require_signed(best, self._key)
                    return best.load(), best.origin
            except EvoengineError as error:
                reasons.append(str(error))
        return None, "; ".join(reasons) or "no place that was named has a kernel for it"


def _shown(request: Request) -> str:
    tensors = ", ".join(f"{str(dtype).removeprefix('torch.')} {list(shape)}" for shape, dtype in request.inputs)
    return f"{request.problem or f'{request.workload} of {tensors}'} on {request.gpu or 'this device'}"


KERNELS = Kernels()


def use(*places: str | os.PathLike[str], key: str | os.PathLike[str] | None = None) -> None:
    """Name the places where kernels are found, in the order in which they are asked.

    A place is the folder of an export (or one that holds several), that of a dispatch table, a ledger (a file or a
    URL), or the address of a server, whose token is in EVOENGINE_TOKEN. From a server no Python code is taken, only the
    binary and its description. What was chosen before is chosen again. With `key`, a public key in PEM, only exports
    are used whose machine code has a record that it signed. Raises UsageError or NothingFound for what is not a place,
    UsageError for what is not a key, and MachineError for a server where the extra `client` is not installed.
    """
    signer = None if key is None else Path(key)
    if signer:
        require_public_key(signer)
    KERNELS.use([place_of(place) for place in places], signer)


_gpu_keys: dict[torch.device, str] = {}


def gpu_key(device: torch.device) -> str:
    """Return the name that evoengine has for a tensor's GPU; empty for others and for a CPU."""
    if device not in _gpu_keys:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else None
        _gpu_keys[device] = next((gpu.key for gpu in known_gpus().values() if gpu.name == name), "")
    return _gpu_keys[device]
