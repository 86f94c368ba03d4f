"""What tests share: spaces from a text or of attention, bound to a problem, and a gate on the emulator."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from evoengine import workloads
from evoengine.devices.driver import find_driver
from evoengine.gpu import Gpu, find_gpu
from evoengine.paths import asset
from evoengine.records import Source
from evoengine.search.judges import full_plan, gate_plan
from evoengine.space.space import SearchSpace, load_space
from evoengine.stages.pipeline import emulate_task
from evoengine.stages.render import render
from evoengine.workloads import find_workload
from evoengine.workloads.attention.problem import AttentionProblem, parse_problem
from evoengine.workloads.base import Target
from tests.fake_cuda.library import NAME as STAND_IN


def wait_for(condition: Callable[[], object]) -> None:
    """Until it holds; five minutes are more than the slowest machine takes for what a test waits for."""
    end = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.1)


def pytest_configure():
    # As in the workers of a search: on tensors this small more threads only wait for one another, at full load.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@cache
def on_stand_in() -> bool:
    """Whether libcuda.so.1 is that of tests/fake_cuda, on which figures mean nothing."""
    found = find_driver()
    return not isinstance(found, str) and found[1][0].name.startswith(STAND_IN)


def pytest_collection_modifyitems(items):
    found = find_driver()
    for item in items:
        if item.get_closest_marker("gpu") and isinstance(found, str):
            item.add_marker(pytest.mark.skip(reason=f"needs a GPU: {found}"))
        if item.get_closest_marker("stand_in") and not on_stand_in():
            item.add_marker(pytest.mark.skip(reason="run by tests/fake_cuda/test_on_stand_in.py on its driver"))


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


def launches(*families: str) -> str:
    """The part of a space file that gives these families a launch, where it is no matter which."""
    return "".join(f"[launch.{family}]\nthreads = 32\ngrid = [1, 1, 1]\nshared = 0\n" for family in families)


def attention_target(problem: str = "b16,h16,s2048,d64,fp16", gpu: str = "h100") -> Target:
    return Target(find_workload("attention"), parse_problem(problem), find_gpu(gpu))


@cache
def attention_space(problem: str = "b16,h16,s2048,d64,fp16", gpu: str = "h100") -> SearchSpace:
    return load_space(asset("search_spaces") / "attention.toml", parse_problem(problem), find_gpu(gpu))


class KernelGate:
    """Renders configurations of a workload's space and puts them, or a doctored text of them, through the gate."""

    def __init__(self, problem: str, gpu: str = "h100") -> None:
        workload, self.problem = workloads.parse_problem(problem)
        self.target = Target(workload, self.problem, find_gpu(gpu))
        self.space = load_space(asset("search_spaces") / f"{workload.name}.toml", self.problem, self.target.gpu)

    def start(self, wanted):
        """The space's first start point that has these values."""
        return next(c for c in self.space.starts if wanted.items() <= c.items())

    def configuration(self, wanted):
        """The first start point that has these values, else the first of many draws."""
        return next(c for c in (*self.space.starts, *self.draw(500, seed=1)) if wanted.items() <= c.items())

    def source(self, config) -> Source:
        return render(self.target, self.space, config, asset("templates"))

    def judge(self, config, source: Source | None = None, seed: int = 7, beside=()):
        """The verdict on the workload's cases, those `beside` them and those at full size."""
        plan = gate_plan(self.space, self.target, config)
        plan += [(case, self.space.launch(config, case.problem)) for case in beside]
        full = full_plan(self.space, self.target, config)
        return emulate_task(self.target.workload, source or self.source(config), plan, full, seed)

    def doctored(self, config, old: str, new: str) -> Source:
        source = self.source(config)
        assert old in source.text, f"the template has no {old!r} any more"
        return Source(source.text.replace(old, new), source.entry, source.launch)

    def draw(self, count: int, seed: int):
        return self.space.sample(np.random.default_rng(seed), count)


@pytest.fixture(scope="session")
def kernel_gate():
    """Gates by problem, `kernel_gate("gemm:m64,n64,k64,fp16")`."""
    return cache(KernelGate)


@pytest.fixture(scope="session")
def attention_gate(kernel_gate):
    """Gates by problem, `attention_gate("b1,h2,s64,d64,fp16")`: of the workload that needs no name."""
    return kernel_gate
