"""evoengine verify --triton: gate every configuration of a Triton kernel."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import triton

from evoengine.errors import UsageError
from evoengine.gpu import Gpu
from evoengine.virtual.device import VirtualGpuError
from evoengine.virtual.gate import ConfigVerdict, GatingGpu
from evoengine.virtual.triton_driver import installed
from evoengine.virtual.triton_file import REFUSALS, Program, config_text, said, why_refused
from evoengine.workloads.base import Host
from evoengine.workloads.triton_kernel import gate_sizes, sizes_text


class Session:
    """A user's kernel in this process, whose configurations are gated one after the other."""

    def __init__(self, host: Host, gpu: Gpu, seed: int) -> None:
        """Execute the file. Raises UsageError if a function is missing."""
        self._program = Program(host, gpu)
        self.configs = tuple(config_text(config) for config in self._program.kernel.configs)
        self._gating = GatingGpu(gpu, self._program, seed)
        self._cases = gate_sizes(self._program.sizes, seed)

    def gate(self, number: int, exact: bool = False) -> ConfigVerdict:
        """Gate the configuration of that number in the list.

        Its outputs are compared with those of the first gated one. With `exact`, it is also built and compared in
        Triton's exact algebra, which does not affect the verdict. Raises UsageError if the function raises for its own
        sizes or launches no such kernel, and if Triton has no exact algebra.
        """
        if exact and not hasattr(triton.knobs.compilation, "fpsan_homomorphic_casts"):
            raise UsageError(f"--exact needs FpSan of Triton 3.9; this is Triton {triton.__version__}")
        gating, program = self._gating, self._program
        gating.verdict = ConfigVerdict(self.configs[number])
        with installed(gating), program.kernel.only(program.kernel.configs[number]):
            _run_cases(gating, program, self._cases)
            if exact and not gating.verdict.wrong:
                _run_exactly(gating, program, self._cases)
        return gating.verdict


def _run_cases(gating: GatingGpu, program: Program, cases: Sequence[Mapping[str, int]]) -> None:
    """Call the function with each set of sizes until one of its launches is wrong."""
    for number, sizes in enumerate(cases):
        why = run_case(gating, program, sizes, number)
        if gating.verdict.wrong:
            return
        if why and not number:
            raise UsageError(f"{program.host.call}({gating.sizes}) {why}")


def run_case(gating: GatingGpu, program: Program, sizes: Mapping[str, int], number: int) -> str | None:
    """Call the function with these sizes, and gate the kernel's launches.

    Return why the function launches nothing with them, which is recorded as a refusal, as is one by Triton. Raises
    UsageError if the kernel cannot be judged.
    """
    gating.begin(sizes_text(sizes))
    try:
        with uninitialized_as_nan(), warnings.catch_warnings():
            torch.manual_seed(gating.seed_of(number))
            program.function(**sizes)
    except REFUSALS as error:
        gating.verdict.refused[gating.sizes] = why_refused(error)
    except (UsageError, VirtualGpuError) as error:
        if isinstance(error, UsageError) or gating.verdict.wrong is None:
            raise UsageError(str(error)) from None
    except Exception as error:
        if gating.verdict.wrong is None:
            gating.verdict.refused[gating.sizes] = said(error, program.path)
            return f"raises {said(error, program.path)}"
    else:
        if not gating.launches:
            gating.verdict.refused[gating.sizes] = f"it launches no kernel {program.kernel.name}"
            return f"launches no kernel {program.kernel.name}"
    return None


def _run_exactly(gating: GatingGpu, program: Program, cases: Sequence[Mapping[str, int]]) -> None:
    """Call the function with each set of sizes that it accepted, with launches of the build in exact algebra."""
    before, triton.knobs.compilation.instrumentation_mode = triton.knobs.compilation.instrumentation_mode, "fpsan"
    gating.exact = True
    try:
        for number, sizes in enumerate(cases):
            gating.begin(sizes_text(sizes))
            if gating.sizes in gating.verdict.refused:
                continue
            try:
                with uninitialized_as_nan():
                    torch.manual_seed(gating.seed_of(number))
                    program.function(**sizes)
            except Exception as error:  # the function may fail on such results in any way
                if not gating.launches:
                    gating.verdict.unbuilt[gating.sizes] = str(error)
    finally:
        gating.exact = False
        triton.knobs.compilation.instrumentation_mode = before


@contextmanager
def uninitialized_as_nan() -> Iterator[None]:
    """Make PyTorch fill new uninitialized tensors with NaN, or with the largest integer."""
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")  # use_deterministic_algorithms imports PyTorch's compiler, for a second
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)
