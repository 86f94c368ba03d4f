"""A search whose candidates are numbers, on the faulty device."""

from __future__ import annotations

import pytest

from tests.support.numbered_search import NumberedSearch


@pytest.fixture
def numbered(tmp_path):
    search = NumberedSearch(tmp_path)
    yield search
    search.ledger.close()
