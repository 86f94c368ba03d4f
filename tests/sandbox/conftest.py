"""Share the search whose candidates are numbers."""

from tests.search.conftest import numbered

__all__ = ["numbered"]
