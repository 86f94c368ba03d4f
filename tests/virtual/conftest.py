from __future__ import annotations

import warnings

import pytest

from tests.support.machine_code import require_tools


@pytest.fixture(scope="module")
def tools():
    require_tools()


@pytest.fixture(scope="module")
def compiled_anew(tmp_path_factory):
    """Triton's cache, which no other run of the tests has filled."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        patch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
        yield
