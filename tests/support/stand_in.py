"""Whether these tests run on the stand-in driver."""

from __future__ import annotations

from functools import cache

from evoengine.devices.driver import find_driver
from tests.fake_cuda.library import NAME as STAND_IN


@cache
def on_stand_in() -> bool:
    """Whether libcuda.so.1 is that of tests/fake_cuda, on which figures mean nothing."""
    found = find_driver()
    return not isinstance(found, str) and found[1][0].name.startswith(STAND_IN)


def visible_devices() -> int:
    return len(find_driver()[1])
