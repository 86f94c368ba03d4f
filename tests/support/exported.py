"""What an exported folder says of itself."""

from __future__ import annotations

import json
from pathlib import Path


def exported_module(folder: Path) -> str:
    """The name of the loader in it, without `.py`."""
    return json.loads((folder / "kernel.json").read_text())["module"]
