"""evoengine run"""

from __future__ import annotations

import runpy
import sys
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import click

from evoengine.cli.options import complete_gpu
from evoengine.errors import UsageError
from evoengine.virtual import activate


@click.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "--gpu",
    metavar="NAME",
    default="h100",
    show_default=True,
    shell_complete=complete_gpu,
    help="GPU to emulate, as listed by evoengine gpus; sm_75 to sm_90 and sm_120 can be executed.",
)
@click.option(
    "--sample",
    is_flag=True,
    help="Execute only a sample of blocks, for about ten seconds, of a launch that would take over a minute.",
)
@click.option("--map-cuda", is_flag=True, help="Create tensors on the CPU if the script asks for device='cuda'.")
@click.argument("script", type=click.Path(path_type=Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(gpu: str, sample: bool, map_cuda: bool, script: Path, arguments: tuple[str, ...]) -> int:
    """Run a Python script with Triton kernels on a virtual GPU.

    SCRIPT runs with your permissions, as python SCRIPT runs it. Launches on CPU tensors are executed from their machine
    code and checked for races and hazards; do_bench and autotuners get predicted times. The summary goes to stderr, and
    the exit code is the script's.
    """
    return run_script(script, arguments, gpu, sample, map_cuda)


_NO_CUDA = ("Torch not compiled with CUDA", "Found no NVIDIA driver", "No CUDA GPUs are available")
"""parts of PyTorch's messages if a script asks for CUDA and there is none"""
HINT = (
    "evoengine: the script asks PyTorch for CUDA, but the virtual GPU works on CPU tensors: leave device out, use "
    "triton.runtime.driver.active.get_active_torch_device(), or add --map-cuda, which maps device='cuda' to the CPU"
)


def run_script(script: Path, arguments: Sequence[str], gpu: str, sample: bool = False, map_cuda: bool = False) -> int:
    """Run the script and return its exit code; 1 after an uncaught exception or a race.

    The summary goes to stderr. `map_cuda` creates CUDA tensors on the CPU and makes torch.cuda describe the virtual
    GPU. Raises UsageError if the script is not a file, and as `activate` does.
    """
    if not script.is_file():
        raise UsageError(f"there is no file {str(script)!r}")
    device = activate(gpu, sample=sample)
    try:
        with ExitStack() as stack:
            if map_cuda:
                from evoengine.virtual.map_cuda import cuda_on_cpu

                stack.enter_context(cuda_on_cpu(device, drop_repeats=True))
            code = _run(script, arguments)
            return code or int(device.raced)
    finally:
        sys.stdout.flush()
        print(device.summary(), file=sys.stderr)


def _run(script: Path, arguments: Sequence[str]) -> int:
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as ended:
        return _exit_code(ended.code)
    except Exception as error:
        own = _from_script(error.__traceback__, str(script))
        traceback.print_exception(error.with_traceback(own))
        if any(part in str(error) for part in _NO_CUDA):
            print(HINT, file=sys.stderr)
        return 1
    return 0


def _exit_code(code: object) -> int:
    """Return the exit code for `code` of SystemExit, as Python does; other objects than numbers are printed."""
    if code is None or isinstance(code, int):
        return code or 0
    print(code, file=sys.stderr)
    return 1


def _from_script(found: TracebackType | None, script: str) -> TracebackType | None:
    """Return the traceback from the script's first frame on."""
    place = found
    while place is not None and place.tb_frame.f_code.co_filename != script:
        place = place.tb_next
    return place
