"""The virtual GPU as Triton's driver and launcher, set by Triton's `runtime.driver.set_active`.

Triton's interface to drivers changes between releases, so only tested versions are accepted.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import triton
import triton.testing
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import _allocation

from evoengine.errors import UsageError
from evoengine.sass.launch import Geometry
from evoengine.virtual.arguments import Arguments, BadArgument, Descriptor, KnownAddresses
from evoengine.virtual.device import LoadedKernel, VirtualGpu, VirtualGpuError
from evoengine.virtual.map_cuda import Event, cuda_on_cpu

OLDEST, NEWEST = (3, 7), (3, 9)
WARP, LARGEST_BLOCK = 32, 1024
"""threads"""
_INLINE = re.compile(r"// begin inline asm.*?// end inline asm", re.DOTALL)
_LINE = re.compile(r"^\s*\.loc\s.*\n", re.MULTILINE)
CLEARING_US = 1e6
"""virtual time of clearing the cache between runs of a benchmark, so long that a loop over a span of time makes one run
"""


def install(device: VirtualGpu) -> None:
    """Make the virtual GPU Triton's active driver. Raises UsageError for another version of Triton."""
    found = re.match(r"(\d+)\.(\d+)", triton.__version__)
    if not found or not OLDEST <= (int(found[1]), int(found[2])) <= NEWEST:
        raise UsageError(f"this is Triton {triton.__version__}; a virtual GPU works with 3.7 to 3.9")
    stop()
    driver = Driver(device)
    triton.runtime.driver.set_active(driver)
    driver.start()
    if triton.knobs.runtime.add_stages_inspection_hook is None:
        triton.knobs.runtime.add_stages_inspection_hook = correct_lines


def stop() -> None:
    """Let the active driver, if it is ours, forget its tensors."""
    active = triton.runtime.driver._active  # noqa: SLF001 # `active` would look for a GPU
    if isinstance(active, Driver):
        active.stop()


def uninstall() -> None:
    """Let Triton look for a GPU of this machine."""
    stop()
    triton.runtime.driver.set_active(Aside())
    if triton.knobs.runtime.add_stages_inspection_hook is correct_lines:
        triton.knobs.runtime.add_stages_inspection_hook = None


@contextmanager
def installed(device: VirtualGpu) -> Iterator[None]:
    """Make the virtual GPU the device of Triton, and of PyTorch's CUDA, for a while."""
    install(device)
    try:
        with cuda_on_cpu(device, drop_repeats=False):
            yield
    finally:
        uninstall()


def correct_lines(
    backend: Any = None, stages: Any = None, options: Any = None, language: Any = None, capability: Any = None
) -> tuple[str, str] | None:
    """Correct the line table of Triton's binaries, as a hook for its stages, which must also return a key.

    Triton 3.9 writes a load without a mask as several lines of inline assembly and counts them as lines, so that the
    load appears some lines after its own.
    """
    if stages is None:
        return "evoengine lines", "1"
    make = stages["ptx"]
    stages["ptx"] = lambda source, metadata: _INLINE.sub(_one_line, make(source, metadata))
    return None


def _one_line(block: re.Match[str]) -> str:
    first = _LINE.search(block[0])
    return block[0][: first.end()] + _LINE.sub("", block[0][first.end() :]) if first else block[0]


class Driver(DriverBase):
    """The interface that Triton requires of a GPU's driver."""

    def __init__(self, device: VirtualGpu) -> None:
        super().__init__()
        self.device = device
        self.utils = Utilities(device)
        self.launcher_cls = Launcher
        self.addresses = KnownAddresses()
        self._recording = ExitStack()

    def start(self) -> None:
        """Record the tensors whose addresses the program takes, and predict benchmarks, until `stop`."""
        self._recording.enter_context(self.addresses.recorded())
        self._recording.enter_context(predicted_benchmarks(self.device))

    def stop(self) -> None:
        self._recording.close()

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        from triton.backends.nvidia.driver import ty_to_cpp

        return str(ty_to_cpp(ty))

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.device.gpu.capability, WARP)

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        """Do nothing, because there is one device."""

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_device_capability(self, device: int = 0) -> tuple[int, int]:
        return divmod(self.device.gpu.capability, 10)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def allocate_default_profile_scratch(self, size: int, alignment: int, stream: int | None) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int8)

    # ── benchmarks ──────────────────────────────────────────────────────────────────────────────────────────────────

    def get_benchmarker(self) -> Callable[..., float | list[float]]:
        """Return the function that times a configuration for autotuners: one call, predicted and not executed."""

        def benchmark(
            call: Callable[[], object], *, quantiles: Sequence[float] | None = None, **_: object
        ) -> float | list[float]:
            ms = predicted_ms(self.device, call)
            return ms if quantiles is None else [ms] * len(quantiles)

        return benchmark

    def get_device_interface(self) -> Interface:
        return Interface(self.device)

    def get_empty_cache_for_benchmark(self) -> Benchmark:
        return Benchmark(self.device)

    def clear_cache(self, cache: Benchmark) -> None:
        self.device.pass_time(CLEARING_US)


@contextmanager
def predicted_benchmarks(device: VirtualGpu) -> Iterator[None]:
    """Replace `do_bench` and `do_bench_cudagraph` in triton.testing by predictions.

    The function is called once to be executed and once to be predicted.
    """

    def do_bench(
        fn: Callable[[], object],
        warmup: int = 25,
        rep: int = 100,
        grad_to_none: Sequence[torch.Tensor] | None = None,
        quantiles: Sequence[float] | None = None,
        return_mode: str = "mean",
    ) -> Any:
        """Return the predicted milliseconds of a call; infinite if it launches nothing or a kernel without a time."""
        assert return_mode in ("min", "max", "mean", "median", "all")
        before = device.now
        fn()
        for tensor in grad_to_none or ():
            tensor.grad = None
        ms = math.inf if device.now.launches == before.launches else predicted_ms(device, fn)
        return triton.testing._summarize_statistics([ms], quantiles, return_mode)  # noqa: SLF001 # as Triton's own do

    def do_bench_cudagraph(
        fn: Callable[[], object],
        rep: int = 20,
        grad_to_none: Sequence[torch.Tensor] | None = None,
        quantiles: Sequence[float] | None = None,
        return_mode: str = "mean",
    ) -> Any:
        return do_bench(fn, 0, rep, grad_to_none, quantiles, return_mode)

    with mock.patch.multiple(triton.testing, do_bench=do_bench, do_bench_cudagraph=do_bench_cudagraph):
        yield


def predicted_ms(device: VirtualGpu, call: Callable[[], object]) -> float:
    """Call with launches only predicted, and return their milliseconds."""
    before, device.only_predicts = device.only_predicts, True
    try:
        start = device.now
        call()
        return device.ms_between(start, device.now)
    finally:
        device.only_predicts = before


class Benchmark:
    """Stands for the buffer with which `do_bench` clears the cache; while it exists, launches are only predicted."""

    def __init__(self, device: VirtualGpu) -> None:
        self._device = device
        device.only_predicts = True

    def __del__(self) -> None:
        self._device.only_predicts = False


class Aside:
    """The driver after the virtual GPU is gone: it frees its kernels, and passes all else to Triton's own driver."""

    def __init__(self) -> None:
        self.utils = AsideUtilities()

    def __getattr__(self, name: str) -> Any:
        return getattr(triton.runtime.driver.default, name)


class AsideUtilities:
    def unload_module(self, module: object) -> None:
        if not isinstance(module, LoadedKernel):
            triton.runtime.driver.default.utils.unload_module(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(triton.runtime.driver.default.utils, name)


class Interface:
    """The part of `torch.cuda` that `triton.testing` uses."""

    def __init__(self, device: VirtualGpu) -> None:
        self._device = device

    def Event(self, enable_timing: bool = False, **_: object) -> Event:
        return Event(self._device)

    def synchronize(self, device: object = None) -> None:
        """Return at once, because launches have ended when they return."""

    def current_device(self) -> int:
        return 0


class Utilities:
    """The functions of a driver's C module that Triton's compiler and runtime call."""

    def __init__(self, device: VirtualGpu) -> None:
        self._device = device

    def load_binary(
        self, name: str, cubin: bytes, shared: int, device: int
    ) -> tuple[LoadedKernel, LoadedKernel, int, int, int]:
        """Return the module, the kernel in it, its registers, its spilled registers and its largest block."""
        loaded = self._device.load(cubin, name)
        kernel = loaded.kernel
        return loaded, loaded, kernel.registers, kernel.local_bytes // 4, kernel.max_threads or LARGEST_BLOCK

    def unload_module(self, module: LoadedKernel) -> None:
        """Do nothing: the kernel is freed with its last reference."""

    def get_device_properties(self, device: int) -> dict[str, int]:
        """Return the data sheet. The product of memory clock and bus width is the GPU's bandwidth."""
        gpu = self._device.gpu
        return {
            "max_shared_mem": gpu.shared_per_block,
            "max_num_regs": gpu.registers_per_sm,
            "multiprocessor_count": gpu.sms,
            "warpSize": WARP,
            "sm_clock_rate": round(gpu.clock_ghz * 1e6),
            "mem_clock_rate": round(gpu.memory_gbs * 1e6 / 2 / 128),
            "mem_bus_width": 1024,
        }


class Launcher:
    """Launches one compiled kernel with the arguments of its Python function."""

    def __init__(self, source: Any, metadata: Any) -> None:
        self._signature = dict(source.signature)
        self._metadata = metadata
        self._function = getattr(getattr(source, "fn", None), "fn", None)

    def __call__(
        self, x: int, y: int, z: int, stream: int, function: LoadedKernel, packed: object, launch_metadata: Any,
        enter: Any, leave: Any, *given: Any,
    ) -> None:  # fmt: skip
        if enter is not None:
            enter(launch_metadata)
        if x * y * z > 0:
            function.function = self._function
            self._launch((x, y, z), function, given)
        if leave is not None:
            leave(launch_metadata)

    def _launch(self, grid: tuple[int, int, int], loaded: LoadedKernel, given: Sequence[Any]) -> None:
        driver, metadata = triton.runtime.driver.active, self._metadata
        together = metadata.num_ctas
        threads = loaded.kernel.max_threads or WARP * metadata.num_warps
        blocks = grid[0] * together, grid[1], grid[2]
        cluster = (together, 1, 1) if together > 1 else None
        geometry = Geometry(blocks, (threads, 1, 1), metadata.shared, cluster)
        try:
            arguments = self._arguments(blocks, given)
        except BadArgument as error:
            raise VirtualGpuError(f"kernel {loaded.kernel.entry}: {error}") from None
        driver.device.launch(
            loaded, geometry, arguments, f"num_warps={metadata.num_warps} num_stages={metadata.num_stages}"
        )

    def _arguments(self, grid: tuple[int, int, int], given: Sequence[Any]) -> Arguments:
        found = Arguments()
        scratch = {name: self._scratch(name, grid) for name in ("global_scratch", "profile_scratch")}
        descriptors = iter(getattr(self._metadata, "tensordesc_meta", None) or ())
        with torch._C.DisableTorchFunction():  # noqa: SLF001 # what a program's own mode sees is what the program does
            for (name, kind), value in zip(self._signature.items(), given, strict=True):
                found.given[str(name)] = value
                found.add(str(name), kind, _with_meta(kind, value, descriptors))
            for name, memory in scratch.items():
                found.add(name, "*i8", memory)
                found.scratch.add(name)
            found.follow(triton.runtime.driver.active.addresses)
        return found

    def _scratch(self, name: str, grid: tuple[int, int, int]) -> torch.Tensor | None:
        """Return memory from the allocator that the program has set, as Triton's own launchers do."""
        size = getattr(self._metadata, f"{name}_size") * grid[0] * grid[1] * grid[2]
        if not size:
            return None
        alignment = getattr(self._metadata, f"{name}_align")
        if name == "profile_scratch":
            return torch.zeros(size, dtype=torch.int8)
        buffer: torch.Tensor = _allocation._allocator.get()(size, alignment, 0)  # noqa: SLF001 # there is no getter
        return buffer


def _with_meta(kind: Any, value: Any, descriptors: Iterator[Any]) -> Any:
    """Add the compiler's description to each tensor descriptor."""
    if isinstance(kind, tuple):
        return [_with_meta(inner, each, descriptors) for inner, each in zip(kind, value, strict=True)]
    if isinstance(kind, str) and kind.startswith("tensordesc"):
        return Descriptor(value, next(descriptors, None))
    return value
