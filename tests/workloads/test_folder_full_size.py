"""A folder's problem at its own lengths: which cases it has, what is compared at full size, what is said of parts."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from evoengine.devices.base import DTYPE_BYTES, TensorParameter
from evoengine.devices.pool import PAGE, BlockLaunch, BlockTrace, ChosenBlock, Pool
from evoengine.errors import UsageError
from evoengine.records import Launch
from evoengine.stages.gate import verify_blocks
from evoengine.stages.verify import run_plan
from evoengine.workloads.base import NothingWritten, WrongBlock
from evoengine.workloads.folder import FolderWorkload
from evoengine.workloads.folder_cases import own_extents, shorter_lengths
from evoengine.workloads.folder_check import check_reference
from evoengine.workloads.folder_definition import size_rules
from evoengine.workloads.folder_full_size_tensors import independent_axes
from evoengine.workloads.folder_groups import Grouping, groupings
from evoengine.workloads.folder_tiles import BITS, check_cover, stored_elements, with_tiles

SPACE = """kernel = "two"
[knobs]
tile = [16, 32]
[launch]
threads = "tile"
grid = ["ceil_div(cols, tile)", "rows", 1]
shared = 0
"""
CONFIG = {"family": "two", "tile": 16}


def workload(reference="return x", sizes=(4096, 8192), **changes: Any) -> FolderWorkload:
    problem = {
        "name": "two", "axes": {"rows": {"type": "var"}, "cols": {"type": "var"}},
        "inputs": {"x": {"shape": ["rows", "cols"], "dtype": "float32"}},
        "outputs": {"out": {"shape": ["rows", "cols"], "dtype": "float32"}},
        "reference": f"import torch\n\ndef run(x, *more):\n    {reference}\n", "space": SPACE,
        "workloads": [{"axes": {"rows": sizes[0], "cols": sizes[1]}}],
    } | changes  # fmt: skip
    return FolderWorkload("two", json.dumps(problem))


def cases_of(found: FolderWorkload, problem: str | None = None):
    return {case.name: case for case in found.cases(found.parse(problem or found.example), CONFIG)}


# ---- the problem's own lengths ----


def test_each_axis_has_its_own_length_in_a_case_beside_short_others():
    cases = cases_of(workload())
    assert cases["own rows"].problem.axes == {"rows": 4096, "cols": 3}
    assert cases["own cols"].problem.axes == {"rows": 3, "cols": 8192}
    assert not cases["own cols"].long and cases["own cols"].part is None


@pytest.mark.parametrize(
    "constraints, rows, cols",
    [
        (["rows == cols"], {"rows": 512, "cols": 512}, {"rows": 512, "cols": 512}),
        (["cols == 4 * rows"], {"rows": 128, "cols": 512}, {"rows": 128, "cols": 512}),
        (["cols % 64 == 0"], {"rows": 128, "cols": 64}, {"rows": 3, "cols": 512}),
        (["cols >= 100"], {"rows": 128, "cols": 128}, {"rows": 3, "cols": 512}),
    ],
)
def test_coupled_axes_are_as_short_as_constraints_allow(constraints, rows, cols):
    own = rows["rows"], cols["cols"]
    found = workload(sizes=own, constraints=constraints)
    problem = found.parse(found.example)
    extents = {
        e.axis: e.problem.axes
        for e in own_extents(
            found.definition, problem, CONFIG, size_rules(found.definition, CONFIG), found.problem_like(problem)
        )
    }
    assert extents == {"rows": rows, "cols": cols}


def test_an_axis_that_takes_too_long_is_cut_with_its_remainders_and_the_case_says_so():
    case = cases_of(workload(sizes=(3, 300_000_019)))["own cols"]
    length = case.problem.axes["cols"]
    assert length < 300_000_019 and length % 65536 == 300_000_019 % 65536
    assert case.part == f"cols {length:,} of 300,000,019"
    assert list(shorter_lengths(1000)) == [1000 % step + step for step in (256, 128, 64, 32, 16, 8, 4, 2)]


def test_a_problem_that_is_small_enough_is_launched_whole_and_has_no_blocks_at_full_size():
    found = workload(sizes=(300, 500))
    problem = found.parse(found.example)
    assert cases_of(found)["the problem itself"].problem == problem
    assert found.full_plan(problem, CONFIG, lambda of: Launch((1, 1, 1), 32, 0)) == []
    large = workload()
    assert "the problem itself" not in cases_of(large)
    assert [case.name for case, _ in large.full_plan(large.parse(large.example), CONFIG, launch_of)] == ["full grid"]


def test_inputs_of_small_cases_are_drawn_as_those_of_the_problem_that_is_tuned():
    draws = [{"x": {"type": "constant", "value": value}} for value in (1, 2)]
    found = workload(
        workloads=[{"axes": {"rows": n, "cols": n}, "inputs": own} for n, own in zip((64, 65), draws, strict=True)]
    )
    for number, value in ((64, 1.0), (65, 2.0)):
        case = cases_of(found, f"two:rows={number},cols={number}")["own rows"]
        assert bool((found.tensors().draw(case, 1).inputs["x"] == value).all())


def test_integers_and_truth_values_are_drawn_from_the_ends_of_their_ranges_too():
    inputs = {
        "x": {"shape": ["rows", "cols"], "dtype": "float32"}, "at": {"shape": ["rows"], "dtype": "int32"},
        "keep": {"shape": ["cols"], "dtype": "bool"},
    }  # fmt: skip
    draws = [{"axes": {"rows": 70, "cols": 90}, "inputs": {"at": {"type": "integers", "low": 0, "high": "cols"}}}]
    found = workload(inputs=inputs, workloads=draws)
    case = cases_of(found)["ends"]
    drawn = [found.tensors().draw(case, seed).inputs for seed in range(8)]
    assert {int(v) for one in drawn for v in one["at"].unique()} == {0, case.problem.axes["cols"] - 1}
    kept = {int(one["keep"].sum()) for one in drawn}
    assert kept <= {0, 1, case.problem.axes["cols"] - 1, case.problem.axes["cols"]} and len(kept) > 1
    assert "ends" not in cases_of(workload())


# ---- a reference that fails at the problem's own size ----


@pytest.mark.parametrize(
    "reference, said",
    [
        ("assert x.shape[1] < 8000; return x", "there the axis cols has the problem's own length, 8,192"),
        ("assert x.shape[0] < 4000; return x", "there the axis rows has the problem's own length, 4,096"),
        ("assert x.numel() < 30_000_000; return x", "it does not where the axis rows is shorter"),
    ],
)
def test_a_reference_that_raises_for_the_problems_own_lengths_is_refused_with_the_axis(reference, said):
    found = workload(reference)
    with pytest.raises(UsageError) as error:
        check_reference(found, found.parse(found.example))
    assert said in str(error.value) and "line 4: AssertionError" in str(error.value) and "\n" not in str(error.value)


# ---- axes that do not concern one another ----

REFERENCES = {
    "return x * 2": ("rows", "cols"),
    "return torch.softmax(x, -1)": ("rows",),
    "return x - x.mean(0)": ("cols",),
    "return torch.cumsum(x, 0)": ("cols",),
    "return torch.tril(x)": (),
    "return x + torch.arange(x.shape[1])": ("rows",),
    "return x.flip(0)": ("cols",),
    "return x / x.norm()": (),
    "return torch.roll(x, 1, 1)": ("rows",),
}


@pytest.mark.parametrize("reference, axes", REFERENCES.items())
def test_axes_along_which_outputs_need_their_own_place_alone_are_found(reference, axes):
    found = workload(reference)
    assert independent_axes(found.definition, found.parse("rows=5,cols=6")) == axes


def test_rows_and_columns_of_a_product_are_independent_and_what_is_summed_over_is_not():
    axes = {axis: {"type": "var"} for axis in "mnk"}
    shapes = {name: {"shape": list(shape), "dtype": "float32"} for name, shape in (("a", "mk"), ("b", "kn"))}
    found = workload(
        "return x @ more[0]", axes=axes, inputs=shapes, outputs={"c": {"shape": ["m", "n"], "dtype": "float32"}},
        workloads=[{"axes": dict.fromkeys("mnk", 5000)}],
        space=SPACE.replace("cols", "n").replace("rows", "m"),
    )  # fmt: skip
    assert independent_axes(found.definition, found.parse("m=5,n=6,k=7")) == ("m", "n")


# ---- what the blocks wrote ----


def launch_of(problem):
    rows, cols = problem.axes["rows"], problem.axes["cols"]
    return Launch((-(-cols // 16), rows, 1), 16, 0)


def computed(asked: BlockLaunch, seed: int, write) -> list[BlockTrace]:
    """Blocks that write their 16 columns of a row, by `write(row, columns, x)`, which gives None or their values."""
    (number, x), (_, out) = ((i, a) for i, a in enumerate(asked.arguments) if hasattr(a, "shape") or hasattr(a, "data"))
    rows, cols = out.shape
    traces = []
    for block in asked.blocks:
        row, first = divmod(block.number, -(-cols // 16))
        columns = np.arange(first * 16, min(first * 16 + 16, cols))
        whole = row * cols + columns
        bits = asked.pool.take(number, whole, 4) if isinstance(x, TensorParameter) else x.data.reshape(-1)[whole]
        values = write(row, columns, np.ascontiguousarray(bits).reshape(-1).view(np.float32))
        pages = np.full(PAGE * 2, 0xFF, np.uint8)
        start = whole[0] * 4 // PAGE * PAGE
        if values is not None:
            pages.view(np.float32)[whole - start // 4] = values
        traces.append(
            BlockTrace(block.number, False, {"x": [], "out": [(start, pages[:PAGE]), (start + PAGE, pages[PAGE:])]})
        )
    return traces


def judge(write, sizes=(4096, 8192), reference="return 2 * x"):
    found = workload(reference, sizes)
    problem = found.parse(found.example)
    plan = found.full_plan(problem, CONFIG, launch_of)
    good = run_plan([], 1, "stand-in", lambda *case: None)
    return verify_blocks(good, found, plan, lambda asked, seed: computed(asked, seed, write), seed=3)


@pytest.mark.parametrize(
    "sizes, reference",
    [
        ((4096, 8192), "return 2 * x"),
        ((60000, 60016), "return 2 * x"),
        ((3000, 8000), "return (2 * x).flip(1).flip(1)"),
    ],
)
def test_right_blocks_pass_and_the_verdict_says_how_many_of_all_were_judged(sizes, reference):
    verdict = judge(lambda row, columns, x: 2 * x, sizes, reference)
    assert verdict.correct, verdict.reason
    (case,) = verdict.cases
    assert case.part.endswith(f" of {sizes[0] * -(-sizes[1] // 16):,} blocks")
    assert int(case.part.split()[0]) >= 32 + 4


WRONG = {
    "values": (lambda row, columns, x: 2.001 * x, "error"),
    "later rows": (lambda row, columns, x: (2.0 + (row > 2000)) * x, "error"),
    "half of the columns": (lambda row, columns, x: np.where(columns % 2, 2 * x, np.nan), "NaN"),
    "some blocks write nothing": (lambda row, columns, x: None if row % 10 == 3 else 2 * x, "wrote nothing: by the others' places"),
    "no block writes at full size": (lambda row, columns, x: 2 * x if len(columns) < 16 else None, "none of"),
}  # fmt: skip


@pytest.mark.parametrize("write, said", WRONG.values(), ids=WRONG)
def test_wrong_blocks_are_incorrect(write, said):
    verdict = judge(write)
    assert not verdict.correct and said in verdict.reason


def test_a_kernel_whose_blocks_write_nothing_alone_is_judged_by_whole_launches_and_the_verdict_says_so():
    """As one whose last block writes all that the others made, by a counter that no folder declares."""
    verdict = judge(lambda row, columns, x: None)
    assert verdict.correct
    assert verdict.cases[0].part == "no block at full size: one alone is not right"


class Shares:
    """Blocks of an output of 64 x 64 in tiles of 8 x 8, on a grid of 8 x 8."""

    def __init__(self, grid=(8, 8, 1), dtype="fp32"):
        self.found = workload(sizes=(64, 64))
        self.item = replace(self.found.definition.outputs[0], dtype=dtype)
        self.problem = self.found.parse(self.found.example)
        self.grid, parameter = grid, TensorParameter("out", (64, 64), dtype, output=True)
        self.asked = BlockLaunch(Launch(grid, 64, 0), [parameter], Pool(np.zeros((1, PAGE), np.uint8)), [])

    def check(self, blocks):
        """`blocks`: the tile, as slices, that each of the chosen ones wrote, or None."""
        chosen = [ChosenBlock(number, 1, True) for number in blocks]
        asked = BlockLaunch(self.asked.launch, self.asked.arguments, self.asked.pool, chosen)
        stored = []
        for number, tile in blocks.items():
            bits = BITS[DTYPE_BYTES[self.item.dtype]]
            output = np.full((64, 64), np.iinfo(bits).max, bits)
            if tile is not None:
                output[tile] = 0
            pages = np.split(output.view(np.uint8).reshape(-1), range(PAGE, output.nbytes, PAGE))
            trace = BlockTrace(number, False, {"out": [(PAGE * i, page) for i, page in enumerate(pages)]})
            stored.append(stored_elements(asked, trace))
        check_cover(self.item, self.problem, asked, stored)
        return with_tiles(self.found.definition, self.problem, asked, stored)


def tile(number, size=8, width=8):
    row, column = number // width * 8, number % width * 8
    return np.s_[row : row + size, column : column + 8]


def test_blocks_whose_shares_make_up_the_output_pass_in_part_and_whole():
    Shares().check({number: tile(number) for number in range(64)})
    Shares().check({number: tile(number) for number in (0, 7, 63, *range(20, 50))})


def test_shares_that_cannot_cover_the_output_are_wrong():
    with pytest.raises(WrongBlock, match="wrote 32 elements of out each: all of them cannot cover its 4096"):
        Shares().check({number: tile(number, size=4) for number in range(5, 45)})
    with pytest.raises(WrongBlock, match="64 of 4096 elements of out were written by no block"):
        Shares().check({number: tile(number) if number != 9 else tile(10) for number in range(64)})
    with pytest.raises(NothingWritten, match="none of 3 blocks wrote any of out"):
        Shares().check(dict.fromkeys((1, 2, 3)))


def test_integers_that_are_the_poison_count_as_written():
    half = {number: tile(number, size=4) for number in range(5, 45)}
    Shares(dtype="int8").check(half)
    with pytest.raises(WrongBlock, match="cannot cover"):
        Shares().check(half)


def test_what_blocks_leave_out_of_their_tiles_counts_as_what_is_there():
    blocks = {number: tile(number) for number in range(20, 60)} | {31: tile(31, size=6), 45: np.s_[43:48, 40:48]}
    found = Shares().check(blocks)
    assert [len(own["out"][0]) for own in found] == [64] * 40
    for place, left in ((11, 16), (25, 24)):
        assert (found[place]["out"][1] == 0xFFFFFFFF).sum() == left
    scattered = {number: tile(number * 37 % 64) for number in range(20, 60)} | {31: tile(31 * 37 % 64, size=6)}
    assert len(Shares().check(scattered)[11]["out"][0]) == 48


def test_a_block_that_is_idle_within_the_output_is_wrong_and_one_behind_its_end_is_not():
    with pytest.raises(
        WrongBlock, match=r"block 30 wrote nothing: by the others' places its part of out is at \[24, 48\]"
    ):
        Shares().check({number: tile(number) if number != 30 else None for number in range(20, 60)})
    wider = {number: tile(number, width=10) if number % 10 < 8 else None for number in range(20, 70)}
    Shares((10, 8, 1)).check(wider)


def test_groups_of_blocks_are_each_block_once():
    """By the axes along which they differ, by neighbours and by strides as long as a knob; none of more than 64."""
    small, grid = (6, 4, 1), (90000, 4, 1)
    ways = groupings(small, grid, {"family": "any", "SPLITS": 4, "BLOCK": 128})
    assert Grouping("axis", 0) in ways and Grouping("axis", 1) not in ways
    for way in ways:
        size = way.size(small)
        found = [block for group in range(24 // size) for block in way.members(small, group)]
        assert sorted(found) == list(range(24))
    assert Grouping("axis", 0).members(grid, 89999) == [89999 + 90000 * y for y in range(4)]
