"""Find the files beside the package, in a checkout as in an installed evoengine."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
_CARRIED = _PACKAGE / "_assets"
"""their folder in a wheel (see tool.hatch in pyproject.toml); a checkout has none"""


def asset(name: str) -> Path:
    """Return the folder "templates", "search_spaces" or "db/migrations"."""
    return (_CARRIED if _CARRIED.is_dir() else _PACKAGE.parent) / name


def package_folder() -> Path:
    """Return the folder of the package's modules."""
    return _PACKAGE


def default_database() -> str:
    """Return the SQLAlchemy URL of the default ledger: db/evoengine.db in the current folder."""
    return f"sqlite:///{Path.cwd() / 'db' / 'evoengine.db'}"
