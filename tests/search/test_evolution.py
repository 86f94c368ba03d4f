from __future__ import annotations

import optuna
import pytest
from optuna.testing.pytest_samplers import BasicSamplerTestCase, RelativeSamplerTestCase, SingleOnlySamplerTestCase

from evoengine.search.samplers.evolution import EvolutionSampler


class TestConformance(BasicSamplerTestCase, RelativeSamplerTestCase, SingleOnlySamplerTestCase):
    """Optuna's own specification of a sampler."""

    @pytest.fixture
    def sampler(self):
        return lambda: EvolutionSampler(seed=0)
