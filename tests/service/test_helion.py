"""Helion's own remote cache, kept by a service; where Helion is installed."""

from __future__ import annotations

from importlib.util import find_spec

import pytest


@pytest.mark.exhaustive
@pytest.mark.skipif(find_spec("helion") is None, reason="pip install evoengine[interop]")
def test_helion_loads_the_backend_and_puts_gets_and_lists(served, monkeypatch):
    from helion.autotuner import remote_cache

    parts = served(require_tokens=True)
    monkeypatch.setenv("HELION_REMOTE_CACHE_BACKEND", "evoengine.service.helion_cache.EvoengineCache")
    monkeypatch.setenv("EVOENGINE_SERVER", parts.url)
    monkeypatch.setenv("EVOENGINE_TOKEN", parts.state.tokens.new("helion", "work", None))
    backend = remote_cache._load_remote_backend()
    assert remote_cache._remote_get(backend, "0" * 64) is None
    remote_cache._remote_put(backend, "0" * 64, '{"config": "{}"}')
    assert remote_cache._remote_get(backend, "0" * 64) == '{"config": "{}"}'
    assert list(backend.list(max_results=5)) == ['{"config": "{}"}']
