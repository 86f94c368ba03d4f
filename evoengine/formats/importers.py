"""What `evoengine new --from KIND:FILE` can read, by kind."""

from __future__ import annotations

from pathlib import Path

from evoengine.errors import UsageError
from evoengine.formats.folder import NewFolder
from evoengine.formats.starter import starter
from evoengine.workloads.folder_reader import require_name

KINDS = ("trace", "t1", "kernel-tuner", "kernelbench")


def make_folder(name: str, source: str | None, reference: Path | None = None, entry: str | None = None) -> NewFolder:
    """The folder `name` from `KIND:FILE`, or a small kernel to start from. Raises UsageError."""
    require_name(name, "the folder", "a kernel")
    if source is None:
        if reference or entry:
            raise UsageError("--reference and --entry say something of an imported file; give it with --from")
        return starter(name)
    raise UsageError(f"--from {source}: unknown kind; known are {', '.join(KINDS)}")
