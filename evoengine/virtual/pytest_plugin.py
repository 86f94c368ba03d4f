"""pytest --virtual-gpu NAME: run the Triton kernels of a project's tests on a virtual GPU.

The option is available to every project's pytest on a machine with the package, so nothing is imported before it is
given.
"""

from __future__ import annotations

from typing import Any

import pytest

from evoengine.errors import EvoengineError

_DEVICE = pytest.StashKey[Any]()
"""key of the VirtualGpu"""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--virtual-gpu",
        metavar="NAME",
        help="run Triton kernels on a virtual GPU, such as h100 (evoengine gpus lists them)",
    )


def pytest_configure(config: pytest.Config) -> None:
    name = config.getoption("--virtual-gpu")
    if name is None:
        return
    from evoengine.virtual import activate

    try:
        config.stash[_DEVICE] = activate(name)
        config.addinivalue_line("filterwarnings", "error::evoengine.virtual.device.RaceWarning")
    except EvoengineError as error:
        raise pytest.UsageError(f"--virtual-gpu: {error}") from None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    device = config.stash.get(_DEVICE, None)
    if device is not None:
        terminalreporter.section("virtual GPU")
        terminalreporter.write_line(device.summary())


def pytest_unconfigure(config: pytest.Config) -> None:
    if _DEVICE in config.stash:
        from evoengine.virtual import deactivate

        deactivate()
