"""A virtual GPU for programs that launch Triton kernels: machine code on a CPU, with predicted times.

    import evoengine.virtual

    evoengine.virtual.activate("h100")

From then on Triton compiles for that GPU, and a launch on CPU tensors is executed by the executor of machine code,
which reports races, hazards and accesses outside of tensors. `triton.testing.do_bench` and autotuners get the time that
the model predicts. `evoengine run` and `pytest --virtual-gpu` do the same for a script and for tests.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING

from evoengine.errors import MachineError

if TYPE_CHECKING:
    from evoengine.virtual.device import VirtualGpu

__all__ = ["activate", "deactivate"]


def activate(gpu: str = "h100", *, sample: bool = False) -> VirtualGpu:
    """Make Triton in this process use the virtual GPU, and return it; `print(gpu.summary())` shows what ran.

    With `sample`, only some blocks of a launch that would take more than a minute are executed. Raises UsageError for a
    GPU that is unknown or whose machine code cannot be executed, or for an unsupported version of Triton, and
    MachineError if Triton is not installed.
    """
    from evoengine.virtual.device import virtual_gpu

    device = virtual_gpu(gpu, sample)
    require_triton()
    from evoengine.virtual.triton_driver import install

    install(device)
    return device


def require_triton() -> None:
    """Raise MachineError if Triton is not installed."""
    if find_spec("triton") is None:
        raise MachineError("Triton is not installed: pip install 'evoengine[triton]'")


def deactivate() -> None:
    """Let Triton look for a GPU of this machine again."""
    if "evoengine.virtual.triton_driver" in sys.modules:
        from evoengine.virtual.triton_driver import uninstall

        uninstall()
