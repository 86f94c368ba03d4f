"""Several kernels at full size: blocks of the last one, each with all blocks of the others whose results it reads."""

from __future__ import annotations

import numpy as np
import pytest

from evoengine.paths import asset
from evoengine.records import Plans
from evoengine.search.evaluators import make_plans
from evoengine.stages.compile import compile_source
from evoengine.stages.render import render
from evoengine.workloads.base import WrongBlock
from evoengine.workloads.folder_tiles import fit_tiling, require_apart
from tests.support.exhaustive import representatives
from tests.support.folders import load
from tests.support.kernel_gate import execute
from tests.support.own_kernels_chains import KERNELS

CASE = "full grid, all kernels"
GOOD = [pytest.param(kernel, seed, id=f"{kernel.name}-{seed}") for seed in (7, 8, 9) for kernel in KERNELS]
FAULTS = [
    pytest.param(kernel, name, seed, id=f"{kernel.name}-{name}-{seed}")
    for seed in (7, 8, 9)
    for kernel in KERNELS
    for name, *_ in kernel.faults
]


def judged(folder, kernel, text, seed):
    """On the cases at full size alone, as machine code: the small ones miss all of these faults."""
    target, space = load(kernel.write(folder, text))
    source = render(target, space, kernel.config, asset("templates"))
    plans = Plans((), (), [case for case in make_plans(space, target, kernel.config).full if case[0].name == CASE])
    return execute(target.workload, source, compile_source(source, target.gpu.arch), plans, seed)


@pytest.mark.parametrize(("kernel", "seed"), representatives(GOOD, "norm_in_place-7"))
def test_a_right_kernel_passes_and_blocks_of_its_last_kernel_are_compared(tmp_path, kernel, seed):
    found = judged(tmp_path, kernel, None, seed)
    assert found.correct, found.reason
    assert found.cases[0].part.endswith("blocks of the last kernel") and found.cases[0].max_error is not None


FAST = ("norm_in_place-late rows are left-7", "split_rows-the second's block in 8 bits-7")


@pytest.mark.parametrize(("kernel", "fault", "seed"), representatives(FAULTS, *FAST))
def test_a_fault_is_caught(tmp_path, kernel, fault, seed):
    assert not judged(tmp_path, kernel, kernel.broken(fault), seed).correct, "the fault escaped"


# ---- which blocks store where ----


def test_the_blocks_that_store_to_a_place_are_those_whose_tiles_hold_it():
    grid, numbers = (5, 7, 3), np.random.default_rng(1).permutation(105)[:40]
    shape = (3, 70, 20)

    def tile(number):
        x, y, z = number % 5, number // 5 % 7, number // 35
        rows, columns = np.arange(10 * y, 10 * y + 10), np.arange(4 * x, 4 * x + 4)
        return ((z * 70 + rows[:, None]) * 20 + columns[None]).reshape(-1)

    found = fit_tiling(shape, grid, numbers, [tile(number) for number in numbers], loose=True)
    found = found.as_wide_as({int(number): tile(number) for number in numbers})
    for number in range(105):
        assert found.holders(tile(number)).tolist() == [number]
        assert found.reaches(number, tile(number)) and not found.reaches(number, tile((number + 1) % 105))


def test_a_tile_of_several_blocks_is_held_by_all_of_them_and_turns_are_counted():
    grid, numbers = (4, 50, 1), np.arange(0, 200, 5)
    own = [number // 4 + 50 * np.arange(3) for number in numbers]
    found = fit_tiling((150,), grid, numbers, own, loose=True)
    found = found.as_wide_as(dict(zip(numbers.tolist(), own, strict=True)))
    assert set(found.holders(np.array([17]))) >= {68, 69, 70, 71}
    assert set(found.holders(np.array([67]))) >= {68, 69, 70, 71}


def test_two_blocks_that_store_to_the_same_elements_alone_are_wrong_but_for_the_last_ones():
    first, second, last = np.arange(4), np.arange(4, 8), np.arange(8, 12)
    require_apart([3, 5, 7, 9], [[first], [second], [last], [last]])
    with pytest.raises(WrongBlock, match="blocks 3 and 9 store to the same elements"):
        require_apart([9, 5, 3, 7], [[first], [second], [first], [last]])
