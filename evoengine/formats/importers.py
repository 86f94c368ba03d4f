"""The importers of `evoengine new --from KIND:FILE`, by kind."""

from __future__ import annotations

import json
from pathlib import Path

from evoengine.errors import UsageError
from evoengine.formats.flashinfer_trace import import_trace
from evoengine.formats.folder import NewFolder, read_text
from evoengine.formats.kernel_tuner import import_script
from evoengine.formats.kernelbench import import_model
from evoengine.formats.starter import starter
from evoengine.formats.t1 import import_t1
from evoengine.workloads.folder import FolderWorkload
from evoengine.workloads.folder_reader import require_name

KINDS = ("trace", "t1", "kernel-tuner", "kernelbench")


def make_folder(name: str, source: str | None, reference: Path | None = None, entry: str | None = None) -> NewFolder:
    """Return the folder `name` from `KIND:FILE`, or one with a small kernel to start from.

    Raises UsageError if the file is invalid, or if evoengine cannot represent its kernel.
    """
    require_name(name, "the folder", "a kernel")
    if source is None:
        if reference or entry:
            raise UsageError("--reference and --entry apply to an imported file; name one with --from")
        return starter(name)
    made = _imported(name, source, reference, entry)
    # parse it, so that invalid content is reported before anything is written
    FolderWorkload(name, json.dumps({**made.problem, "space": made.space}))
    return made


def _imported(name: str, source: str, reference: Path | None, entry: str | None) -> NewFolder:
    kind, colon, text = source.partition(":")
    if kind not in KINDS or not colon or not text:
        raise UsageError(f"--from {source}: it must be KIND:FILE, where KIND is one of {', '.join(KINDS)}")
    if entry and kind != "kernel-tuner":
        raise UsageError(f"--entry chooses among the kernels of a kernel-tuner script; {source} is none")
    if reference and kind == "kernelbench":
        raise UsageError("--reference: a kernelbench file is its own reference; leave it out")
    code = read_text(reference, "the reference") if reference else None
    match kind:
        case "trace":
            definition, _, workloads = text.partition(",")
            return import_trace(Path(definition), Path(workloads) if workloads else None, name, code)
        case "t1":
            return import_t1(Path(text), name, code)
        case "kernel-tuner":
            return import_script(Path(text), name, code, entry)
    return import_model(Path(text), name)
