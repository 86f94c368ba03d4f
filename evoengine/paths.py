"""Where the files beside the package lie, in a checkout and in an installed evoengine alike."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
_CARRIED = _PACKAGE / "_assets"
"""where a wheel has them (see tool.hatch in pyproject.toml); a checkout has no such folder"""


def asset(name: str) -> Path:
    """The folder of that name: "templates", "search_spaces" or "db/migrations"."""
    return (_CARRIED if _CARRIED.is_dir() else _PACKAGE.parent) / name


def default_database() -> str:
    """SQLAlchemy URL of db/evoengine.db: in the checkout evoengine runs from, else in the current folder."""
    home = Path.cwd() if _CARRIED.is_dir() else _PACKAGE.parent
    return f"sqlite:///{home / 'db' / 'evoengine.db'}"
