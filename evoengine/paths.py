"""Where the files beside the package lie: in a checkout next to it, in an installed evoengine inside it."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
_CHECKOUT = _PACKAGE.parent
_FOLDERS = {"templates": "templates", "search_spaces": "search_spaces", "migrations": "db/migrations"}


def asset(name: str) -> Path:
    """The folder of that name: "templates", "search_spaces" or "migrations"; raises KeyError on any other."""
    beside = _CHECKOUT / _FOLDERS[name]
    return beside if beside.is_dir() else _PACKAGE / "_assets" / name


def default_database() -> str:
    """SQLAlchemy URL of db/evoengine.db: in the checkout evoengine runs from, else in the current folder."""
    root = _CHECKOUT if (_CHECKOUT / _FOLDERS["migrations"]).is_dir() else Path.cwd()
    return f"sqlite:///{root / 'db' / 'evoengine.db'}"
