"""A search whose candidates are numbers, on the faulty device."""

from __future__ import annotations

from dataclasses import replace

import pytest

from evoengine.search import evaluators
from evoengine.search.evaluators import RUNNER_LIMITS
from tests.support.numbered_search import NumberedSearch


@pytest.fixture
def numbered(tmp_path, monkeypatch):
    """Its runner is forked: without CUDA it need not begin with nothing, which takes a third of most tests' time. That
    of a GPU's search is shown by tests/devices/test_cuda.py, tests/hostile and `make test-all`."""
    monkeypatch.setattr(evaluators, "RUNNER_LIMITS", replace(RUNNER_LIMITS, forked=True))
    search = NumberedSearch(tmp_path)
    yield search
    search.ledger.close()


@pytest.fixture
def quick(numbered):
    """As `numbered`, for what is no matter of the workers that compile."""
    numbered.compiles_here = True
    return numbered
