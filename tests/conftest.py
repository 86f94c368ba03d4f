"""What tests share: spaces from a text or of attention, bound to a problem, and a gate on the emulator."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest

from evoengine import workloads
from evoengine.devices.driver import find_driver
from evoengine.gpu import Gpu, find_gpu
from evoengine.ledger.store import Ledger, open_ledger
from evoengine.space.space import SearchSpace, load_space
from evoengine.workloads import find_workload
from evoengine.workloads.attention.problem import AttentionProblem, parse_problem
from evoengine.workloads.base import Target
from tests.support.stand_in import on_stand_in


def pytest_configure():
    heed_signals()
    gc.disable()  # while tests are collected: hardly anything of that is garbage
    # As in the workers of a search: on tensors this small more threads only wait for one another, at full load.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def heed_signals() -> None:
    """Processes that tests start inherit what is ignored here, as SIGINT is in the background of a script and SIGHUP
    under nohup; what has a handler is heeded in them. A hang-up still ends no tests."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda number, frame: None)


def pytest_collection_finish():
    # What collection made stays until the end: no later pass of the garbage collector need walk through it.
    gc.enable()
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items):
    found = find_driver()
    for item in items:
        if item.get_closest_marker("gpu") and isinstance(found, str):
            item.add_marker(pytest.mark.skip(reason=f"needs a GPU: {found}"))
        if item.get_closest_marker("stand_in") and not on_stand_in():
            item.add_marker(pytest.mark.skip(reason="run by tests/fake_cuda/test_on_stand_in.py on its driver"))


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    """An empty ledger."""
    with open_ledger(str(tmp_path / "ledger.db"), create=True) as opened:
        yield opened


@pytest.fixture(autouse=True)
def registered_workloads() -> Iterator[None]:
    """Whoever names a folder with a kernel registers its workload, in a test for that test alone."""
    with patch.dict(workloads._registered):
        yield


@pytest.fixture
def problem() -> AttentionProblem:
    return parse_problem("b16,h16,s2048,d64,fp16")


@pytest.fixture
def gpu() -> Gpu:
    return find_gpu("h100")


@pytest.fixture
def target(problem: AttentionProblem, gpu: Gpu) -> Target:
    return Target(find_workload("attention"), problem, gpu)


@pytest.fixture
def load(tmp_path: Path, problem: AttentionProblem, gpu: Gpu) -> Callable[[str], SearchSpace]:
    """Reads a space file of that text."""

    def loaded(text: str) -> SearchSpace:
        path = tmp_path / "space.toml"
        path.write_text(text)
        return load_space(path, problem, gpu)

    return loaded


@pytest.fixture(scope="session")
def kernel_gate():
    """Gates by problem, `kernel_gate("gemm:m64,n64,k64,fp16")`."""
    from tests.support.kernel_gate import KernelGate

    return cache(KernelGate)


@pytest.fixture(scope="session")
def attention_gate(kernel_gate):
    """Gates by problem, `attention_gate("b1,h2,s64,d64,fp16")`: of the workload that needs no name."""
    return kernel_gate
