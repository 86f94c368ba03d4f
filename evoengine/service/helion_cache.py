"""Helion's remote cache in the service: HELION_REMOTE_CACHE_BACKEND=evoengine.service.helion_cache.EvoengineCache

EVOENGINE_SERVER is the service's URL; EVOENGINE_TOKEN, or a file that EVOENGINE_TOKEN_FILE names, holds a token of
scope work. Helion falls back to its local cache if a call fails.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from helion.autotuner import RemoteCacheBackend

from evoengine.errors import UsageError
from evoengine.service.client import Client

PREFIX = "helion."
"""prefix of the keys, so that entries of other tuners are not listed"""
LISTED = 100


class EvoengineCache(RemoteCacheBackend):
    """A remote cache; Helion creates one per kernel, and each call is a request."""

    def __init__(self) -> None:
        """Connect to the service. Raises UsageError if none is named."""
        url = os.environ.get("EVOENGINE_SERVER")
        if not url:
            raise UsageError("EVOENGINE_SERVER is not set; it names the service, as in http://tuner.example:8765")
        self._client: Client = Client(url)

    def get(self, key: str) -> str | None:
        """Return the JSON stored under the key, or None."""
        return self._client.cached(PREFIX + key)

    def put(self, key: str, data: str) -> None:
        self._client.store(PREFIX + key, data)

    def list(self, max_results: int | None = None) -> Iterable[str]:
        """Yield entries, newest first."""
        return self._client.all_cached(PREFIX, max_results or LISTED)
