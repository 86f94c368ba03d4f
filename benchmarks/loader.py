"""Host time of a call of the exported loader, on a driver that does nothing. No GPU, and no figure of one.

    python benchmarks/loader.py [--calls 2000]

The driver is tests/support/loader_driver.c; torch's tensors are on the CPU and taken for a GPU's. A call costs here
what Python and ctypes do around the driver's work. The work of a real driver comes on top, and torch's look-up of its
current stream, which a torch without CUDA does not have.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch
from rich.console import Console
from rich.table import Table

from evoengine.gpu import find_gpu
from evoengine.publish.export import export
from evoengine.records import Binary, Candidate, Launch, Outcome, Source
from evoengine.sandbox.host_compiler import find_compiler
from evoengine.workloads import parse_problem
from evoengine.workloads.base import Target

DRIVER = Path(__file__).parents[1] / "tests" / "support" / "loader_driver.c"
KERNELS = {
    "no tensor maps": {"family": "wmma", "tile_m": 64, "tile_n": 64},
    "4 tensor maps": {"family": "wgmma", "tile_m": 128, "tile_n": 128, "load": "tma", "o_store": "tma"},
}


def build_driver(folder: Path) -> ctypes.CDLL:
    library = folder / "driver.so"
    subprocess.run([find_compiler(), "-shared", "-fPIC", "-O2", "-xc", str(DRIVER), "-o", str(library)], check=True)
    driver = ctypes.CDLL(str(library))
    (ctypes.c_int * 128).in_dll(driver, "attributes")[97] = 232448
    return driver


def load(config: dict[str, object], folder: Path, driver: ctypes.CDLL) -> ModuleType:
    """The loader of a kernel without code, to which the CPU is GPU 0."""
    source = Source("", "attention", Launch((1, 1, 1), 384, 100_000))
    binary = Binary(b"none", "sm_90a", "", "none 13.0", 168, 0, 0, 0, (), {}, 0.0)
    target = Target(*parse_problem("attention:b2,h8,s512,d64,fp16"), find_gpu("h100"))
    problem = str(target.problem)
    made = Candidate(1, 1, problem, "h100", config, Outcome.ESTIMATED, source=source, binary=binary)
    export(made, target, folder)
    (path,) = folder.glob("attention_*.py")
    spec = importlib.util.spec_from_file_location(folder.name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    # so that this driver is found, and not one that the machine may have
    module._cuda.ctypes = SimpleNamespace(**vars(ctypes) | {"CDLL": lambda name: driver})
    module._cuda.Torch.gpu_index = staticmethod(lambda device: 0)
    module._cuda.Torch.stream = staticmethod(lambda gpu_index: 0)
    return module


def tensors(seq: int = 512) -> tuple[torch.Tensor, ...]:
    return tuple(torch.empty(2, 8, seq, 64, dtype=torch.float16) for _ in range(3))


def microseconds(call: Callable, arguments: Iterable) -> list[float]:
    """Of each call, one per arguments."""
    found = []
    for given in arguments:
        begun = time.perf_counter_ns()
        call(*given)
        found.append((time.perf_counter_ns() - begun) / 1000)
    return found


def measure(module: ModuleType, calls: int) -> dict[str, list[float]]:
    attention, same = module.attention, tensors()
    fresh = [tensors() for _ in range(min(calls, 200))]
    shapes = [tensors(seq) for seq in range(1, 1 + min(calls, 200))]
    return {
        "first call: loads the kernel": microseconds(attention, [same]),
        "the same tensors": microseconds(attention, [same] * calls),
        "the same tensors, out given": microseconds(attention, [(*same, torch.empty_like(same[0]))] * calls),
        "new tensors of the same shape": microseconds(attention, fresh),
        "a new shape": microseconds(attention, shapes),
    }


def bare_launch(module: ModuleType, calls: int) -> list[float]:
    """cuLaunchKernel by ctypes alone, all its arguments ready: the least that a launch from Python can take."""
    gpu, launch = module._gpu(0), module._cuda.driver_function("cuLaunchKernel")
    values = (ctypes.c_uint64 * 16)()
    addresses = (ctypes.c_void_p * 16)(*[ctypes.addressof(values)] * 16)
    previous = module._cuda.switch_context(gpu.context)
    samples = microseconds(launch, [(gpu.function, 4, 8, 2, 384, 1, 1, 100_000, None, addresses, None)] * calls)
    module._cuda.switch_context(previous)
    return samples


def show(found: dict[str, list[float]], bare: float) -> Table:
    table = Table(title="Host time per call on a driver that does nothing (CPU figures, no GPU took part)")
    for column in ("kernel", "call", "calls", "fastest µs", "median µs", "90 % below µs", "× bare launch"):
        table.add_column(column, justify="left" if column in ("kernel", "call") else "right")
    for name, samples in found.items():
        median, high = statistics.median(samples), sorted(samples)[int(0.9 * len(samples))]
        figures = (f"{len(samples)}", f"{min(samples):.1f}", f"{median:.1f}", f"{high:.1f}", f"{median / bare:.1f}")
        table.add_row(*name.split(": ", 1), *figures)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=2000)
    options = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        driver = build_driver(Path(folder))
        for name, config in KERNELS.items():
            module = load(config, Path(folder, name.replace(" ", "_")), driver)
            found |= {f"{name}: {what}": samples for what, samples in measure(module, options.calls).items()}
        found["ctypes: cuLaunchKernel alone"] = bare_launch(module, options.calls)
    Console().print(show(found, statistics.median(found["ctypes: cuLaunchKernel alone"])))


if __name__ == "__main__":
    main()
