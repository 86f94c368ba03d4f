"""Where the files beside the package lie, in a checkout and in an installed evoengine alike.

`_assets` holds links to the checkout's folders; a wheel carries what they point to.
"""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def asset(name: str) -> Path:
    """The folder of that name: "templates", "search_spaces" or "migrations"."""
    return (_PACKAGE / "_assets" / name).resolve()


def default_database() -> str:
    """SQLAlchemy URL of db/evoengine.db: in the checkout evoengine runs from, else in the current folder."""
    beside = _PACKAGE.parent / "db"
    folder = beside if (beside / "migrations").is_dir() else Path.cwd() / "db"
    return f"sqlite:///{folder / 'evoengine.db'}"
