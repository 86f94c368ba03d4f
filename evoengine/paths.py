"""Where the files beside the package lie, in a checkout and in an installed evoengine alike."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
_CARRIED = _PACKAGE / "_assets"
"""where a wheel has them (see tool.hatch in pyproject.toml); a checkout has no such folder"""


def asset(name: str) -> Path:
    """The folder of that name: "templates", "search_spaces" or "db/migrations"."""
    return (_CARRIED if _CARRIED.is_dir() else _PACKAGE.parent) / name


def package_folder() -> Path:
    """The package's own modules."""
    return _PACKAGE


def default_database() -> str:
    """SQLAlchemy URL of the ledger where none is named: db/evoengine.db in the current folder."""
    return f"sqlite:///{Path.cwd() / 'db' / 'evoengine.db'}"
