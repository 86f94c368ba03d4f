"""Let a stage handle a proposal in a jail: what reads its text and its machine code reaches nothing of the user's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from evoengine.cuda_files import disassembler, toolkit
from evoengine.sandbox.jailed_call import call
from evoengine.sass import build
from evoengine.stages.toolchain import include_folders

T = TypeVar("T")


def in_jail(
    stage: Callable[..., T], *args: object, returns: Any, raises: tuple[type[Exception], ...], executes: bool = True
) -> T:
    """Call a stage in a jail and return its answer, a `returns`. Raises as `jailed_call.call` does.

    A stage that `executes` machine code has the executor there, which is built here before. Raises MachineError where
    it cannot be.
    """
    library = build.build() if executes else None
    tool = Path(disassembler() or "/usr/bin/nvdisasm")
    needed = [*include_folders(), toolkit(), tool, *([library] if library else [])]
    readable = [path for path in needed if path.exists()]
    environment = {"CUDA_HOME": str(toolkit()), "PATH": f"/usr/bin:/bin:{tool.parent}"}
    answer: T = call(
        _run, library, stage, args, returns=returns, raises=raises, readable=readable, environment=environment
    )
    return answer


def _run(library: Path | None, stage: Callable[..., T], args: tuple[object, ...]) -> T:
    if library:
        build.use(library)
    return stage(*args)
