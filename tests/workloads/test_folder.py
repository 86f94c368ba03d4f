"""A problem.json: what it says, how its problems are written, the gate's cases, and every fault in one sentence."""

from __future__ import annotations

import json
import pickle
from typing import Any

import numpy as np
import pytest
import torch

from evoengine.devices.base import ConstantParameter, ScalarArgument, TensorParameter
from evoengine.errors import UsageError
from evoengine.stages.verify import by_own_error
from evoengine.workloads.folder import FolderWorkload, load_folder
from tests.support.folders import SAXPY, SAXPY_SPACE, saxpy

X = {"shape": ["n"], "dtype": "float32"}
OUT = {"out": X}


def workload(**changes: Any) -> FolderWorkload:
    return FolderWorkload("saxpy", json.dumps(SAXPY | {"space": SAXPY_SPACE} | changes))


def test_a_folder_is_a_workload_that_knows_its_kernels_parameters(tmp_path):
    found = load_folder(saxpy(tmp_path))
    parameters = found.parameters(found.parse("saxpy:n=100"), {})
    assert [p.name for p in parameters] == ["x", "y", "a", "out", "n"]
    assert parameters[0] == TensorParameter("x", (100,), "fp32")
    assert parameters[2] == ScalarArgument("a", np.float32(2.5))
    assert parameters[3] == TensorParameter("out", (100,), "fp32", output=True)
    assert parameters[4] == ScalarArgument("n", np.int32(100))


def test_the_first_workload_is_the_example_and_costs_are_counted_where_none_are_stated():
    found = workload()
    problem = found.parse(found.example)
    assert str(problem) == "saxpy:n=4096" and found.parse(str(problem)) == problem
    assert (found.flops(problem), found.min_dram_bytes(problem)) == (3 * 4096, 3 * 4096 * 4)
    stated = workload(flops="2 * n", bytes="12 * n")
    assert (stated.flops(problem), stated.min_dram_bytes(problem)) == (2 * 4096, 12 * 4096)


def test_axes_may_be_constant_or_follow_from_others_and_constant_ones_are_baked_in():
    axes = {"n": {"type": "var"}, "half": {"type": "expr", "expression": "n // 2"}, "k": {"type": "const", "value": 3}}
    found = workload(
        axes=axes, outputs={"out": {"shape": ["half", "k + 1"], "dtype": "float16"}}, parameters=["x", "y", "out"]
    )
    problem = found.parse("n=10")
    assert problem.variables() == {"n": 10, "half": 5, "k": 3}
    assert found.parameters(problem, {})[2] == TensorParameter("out", (5, 4), "fp16", output=True)
    assert found.compile_time == ("k",)
    assert workload(compile_time=["n"], axes=axes).compile_time == ("n", "half", "k")


def test_an_axis_of_64_bits_is_passed_as_such():
    found = workload(axes={"n": {"type": "var", "dtype": "int64"}}, parameters=["n", "x", "y", "out"])
    (argument, *_) = found.parameters(found.parse("n=10"), {})
    assert isinstance(argument, ScalarArgument) and argument.value.dtype == np.int64


def test_a_workload_travels_by_pickle_and_by_its_text_alone(tmp_path):
    found = load_folder(saxpy(tmp_path))
    assert pickle.loads(pickle.dumps(found)) == found
    elsewhere = FolderWorkload("saxpy", found.definition_text)
    problem = found.parse("saxpy:n=77")
    assert elsewhere.parse(str(problem)) == problem
    assert elsewhere.cases(problem, {"tile": 64}) == found.cases(problem, {"tile": 64})
    assert elsewhere.templates() is None


def test_a_reference_may_lie_beside(tmp_path):
    folder = saxpy(tmp_path, reference="reference.py")
    (folder / "reference.py").write_text("def run(x, y, a):\n    return x\n")
    assert "return x" in load_folder(folder).definition_text


def test_two_outputs_are_taken():
    found = workload(outputs={"out": X, "sum": {"shape": [], "dtype": "float32"}})
    parameters = found.parameters(found.parse("n=5"), {})
    assert [(p.name, p.shape) for p in parameters if getattr(p, "output", False)] == [("out", (5,)), ("sum", ())]


@pytest.mark.parametrize("spacings", [(1, 64), (1.5, 1), (1, 65)])
def test_each_output_is_allowed_the_spacings_of_its_own_dtype(spacings):
    """Such as an attention's logarithms in float32 beside its output of 16 bits."""
    narrow = {"out": {"shape": ["n"], "dtype": "float16"}, "sums": X}
    found = workload(outputs=narrow, reference="def run(x, y, a):\n    return x.half(), y\n")
    ones, exact = torch.ones(32), torch.ones(32, dtype=torch.float64)
    results = {"out": exact + spacings[0] * 2.0**-10, "sums": exact + spacings[1] * 2.0**-23}
    own = {"out": ones.half(), "sums": ones}
    wrong = [
        bound.name
        for name, eps in (("out", 2.0**-10), ("sums", 2.0**-23))
        for bound in by_own_error(name, results[name] - exact, exact, own[name] - exact, eps, found.tolerance)
        if bound.error > bound.allowed
    ]
    assert bool(wrong) == (spacings != (1, 64)), wrong


def test_an_input_may_lie_in_constant_memory_alone_or_in_both():
    alone = workload(constants={"x": "x"})
    assert [p.name for p in alone.parameters(alone.parse("n=5"), {})] == ["y", "a", "out", "n", "x"]
    both = workload(constants={"c_x": "x"}, parameters=["x", "y", "out", "n"])
    assert both.parameters(both.parse("n=5"), {})[-1] == ConstantParameter("c_x", (5,), "fp32", "x")


@pytest.mark.parametrize(
    "text, complaint",
    {
        "saxpy:": "gives no n",
        "saxpy:m=4": "'m=4' that is none of n=…; write it like saxpy:n=4096",
        "saxpy:n4": "'n4' that is none of",
        "saxpy:n=0": "an axis is an integer from 1 to 2147483647",
        "saxpy:n=4294967296": "an axis is an integer from 1",
        "saxpy:n=4,n=5": "gives n twice",
        "saxpy:n=-4": "none of n=…",
        "saxpy:n=5": "breaks the constraint `n % 4 == 0`",
    }.items(),
)
def test_a_problem_that_cannot_be_is_refused_in_one_sentence(text, complaint):
    with pytest.raises(UsageError) as error:
        workload(constraints=["n % 4 == 0"]).parse(text)
    assert complaint in str(error.value) and "\n" not in str(error.value)


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown axis in a shape": ({"outputs": {"out": {"shape": ["m"], "dtype": "float32"}}}, "names m, which is not an axis; axes are n"),
    "shape that its axes do not give": ({"outputs": {"out": {"shape": ["n - 5000"], "dtype": "float32"}}}, "`n - 5000` is -904"),
    "axis of another dtype": ({"axes": {"n": {"type": "var", "dtype": "float32"}}}, "axis n has the dtype 'float32'; the kernel takes it as int32, or as int64"),
    "reference that takes scratch memory": (
        {"scratch": {"s": {"shape": ["n"], "dtype": "float32"}}, "parameters": ["x", "y", "s", "out", "n"], "reference": {"file": "a.cu", "text": "", "entry": "a"}},
        "the reference's kernel takes s; it can take inputs, outputs and axes alone, which reference.parameters names",
    ),
    "kernels in another order than the space launches": (
        {"kernels": {"first": ["x"], "second": ["y"]}, "space": "[kernels.second]\ngrid = 1\n[kernels.first]\ngrid = 1\n"},
        "space.toml launches second, first, and problem.json has these kernels as first, second; they run one behind the other",
    ),
    "reference without run": ({"reference": "def f(x):\n    return x\n"}, "has no function run; define run(*inputs)"),
    "reference that is no Python": ({"reference": "def run(:"}, "not valid Python, line 1"),
    "in place": ({"outputs": {"x": X}}, 'named among the inputs, and in "inout": ["x"]'),
    "dtype that the emulator does not have": (
        {"outputs": {"out": {"shape": ["n"], "dtype": "float8_e4m3fn"}}}, "it has float64, float32, float16, bfloat16",
    ),
    "output by value": ({"outputs": {"out": {"shape": None, "dtype": "float32"}}}, "give it the shape []"),
    "half by value": ({"inputs": {"a": {"shape": None, "dtype": "float16"}}}, "by value go fp32, fp64, int32, int64"),
    "unknown key": ({"tolerence": {}}, "unknown key 'tolerence'; did you mean tolerance?"),
    "no workloads": ({"workloads": []}, "no workloads; give at least one with values for the axes n"),
    "workload without an axis": ({"workloads": [{"axes": {}}]}, "workloads[0] gives no value for n"),
    "workload with a text for an axis": ({"workloads": [{"axes": {"n": "4"}}]}, "gives n the value '4'"),
    "scalar without a value": ({"workloads": [{"axes": {"n": 4}}]}, "gives no value for a; write"),
    "scalar beyond float": ({"workloads": [{"axes": {"n": 4}, "inputs": {"a": {"type": "scalar", "value": 1e39}}}]}, "which is not fp32"),
    "scalar beyond all floats": ({"workloads": [{"axes": {"n": 4}, "inputs": {"a": {"type": "scalar", "value": 10**400}}}]}, "which is not fp32"),
    "scalar beyond its integers": (
        {
            "inputs": {"k": {"shape": None, "dtype": "int32"}},
            "workloads": [{"axes": {"n": 4}, "inputs": {"k": {"type": "scalar", "value": 2**31}}}],
        },
        "has the value 2147483648, which is not int32",
    ),
    "scalar as a text": ({"workloads": [{"axes": {"n": 4}, "inputs": {"a": {"type": "scalar", "value": "1"}}}]}, "which is not fp32"),
    "scalar of null": ({"workloads": [{"axes": {"n": 4}, "inputs": {"a": {"type": "scalar", "value": None}}}]}, "has the value None, which is not fp32"),
    "constant of null": (
        {"workloads": [{"axes": {"n": 4}, "inputs": {"x": {"type": "constant", "value": None}}}]}, "has the value None, which is not fp32",
    ),
    "unknown draw": ({"workloads": [{"axes": {"n": 4}, "inputs": {"x": {"type": "normal"}}}]}, "has the type 'normal'; known are random"),
    "draw of no input": ({"workloads": [{"axes": {"n": 4}, "inputs": {"z": {"type": "random"}}}]}, "names z, which is not an input"),
    "parameters without a tensor": ({"parameters": ["x", "out", "n"]}, "leaves out the tensor y"),
    "parameters with a stranger": ({"parameters": ["x", "y", "out", "m"]}, "names 'm', which is not an input, output, scratch memory or axis"),
    "constant of no input": ({"constants": {"c_x": "out"}}, "gives c_x the contents of 'out', which is not an input tensor: x, y"),
    "constant that is a parameter too": ({"constants": {"x": "x"}, "parameters": ["x", "y", "out"]}, "names x, which is in constants"),
    "axes in a circle": (
        {"axes": {"n": {"type": "expr", "expression": "k"}, "k": {"type": "expr", "expression": "n"}}}, "in terms of each other",
    ),
    "axis of no type": ({"axes": {"n": {}}}, 'axis n must be {"type": "var"}'),
    "axis of zero": ({"axes": {"n": {"type": "const", "value": 0}}}, "axis n has the value 0"),
    "tolerance below zero": ({"tolerance": {"rtol": -1}}, "tolerance.rtol is -1"),
    "code in an expression": ({"flops": "__import__('os').getpid()"}, "calls __import__('os').getpid; only ceil_div"),
    "name that is a path": ({"name": "../saxpy"}, "cannot name a kernel"),
    "entry with blanks": ({"entry": "a b"}, "cannot name a kernel's entry"),
    "in-out of no tensor": ({"inout": ["a"]}, "inout names 'a', which is not an input tensor: x, y"),
    "part of an output without an end": (
        {"outputs": {"out": {"shape": ["n"], "dtype": "float32", "writes": ["1"]}}}, 'as in ["1:h - 1", "0:w"]',
    ),
    "part that is larger than its output": (
        {"outputs": {"out": {"shape": ["n"], "dtype": "float32", "writes": ["0:n + 1"]}}}, "is 0:4097 for saxpy:n=4096; a part of 4096 indices",
    ),
    "cooperative launch": ({"cooperative": True}, "cooperative launches are not made"),
    "map of a wrong rank": (
        {"tensor_maps": {"m": {"tensor": "x", "dims": ["n", 1], "box": [64]}}, "parameters": ["m", "y", "a", "out"]},
        "tensor_maps.m has 2 dims, 0 strides and a box of 1; a map of n dims has n - 1 strides and a box of n",
    ),
    "map of no tensor": ({"tensor_maps": {"m": {"tensor": "a", "dims": ["n"], "box": [64]}}}, "views 'a', which is not a tensor; tensors are x, y, out"),
    "map without parameters": ({"tensor_maps": {"m": {"tensor": "x", "dims": ["n"], "box": [64]}}}, "has m and no parameters; list the kernel's"),
    "map that nobody takes": (
        {"tensor_maps": {"m": {"tensor": "x", "dims": ["n"], "box": [64]}}, "parameters": ["x", "y", "a", "out"]}, "leaves out m; a kernel gets every tensor map",
    ),
    "struct without its size": ({"structs": {"p": {"at": {}}}}, "structs.p needs its bytes and what lies at which of them"),
    "part behind its struct": ({"structs": {"p": {"bytes": 8, "at": {"8": "x"}}}}, "has '8'; its names are offsets in bytes below 8"),
    "part that ends behind its struct": (
        {"structs": {"p": {"bytes": 12, "at": {"8": "x"}}}, "parameters": ["p", "y", "a", "out"]}, "what lies at 8 ends at byte 16 of 12",
    ),
    "part of no name": ({"structs": {"p": {"bytes": 8, "at": {"0": "z"}}}}, "names 'z', which is none of x, y, a, out, n"),
    "number that does not fit": (
        {"structs": {"p": {"bytes": 24, "at": {"0": "x", "8": "y", "16": {"int8": "n"}}}}, "parameters": ["p", "a", "out"]},
        "`n` is 4096, which is not int8",
    ),
    "indices of a float": (
        {"workloads": [{"axes": {"n": 4}, "inputs": {"x": {"type": "permutation"}}}]}, "x is fp32; indices are int32 or int64",
    ),
    "input that nobody makes": (
        {"workloads": [{"axes": {"n": 4}, "inputs": {"x": {"type": "made", "by": "f"}}}]}, "is made by 'f', which is not a function of makers",
    ),
    "makers that are no Python": ({"makers": "def f(:"}, "the text of makers is not valid Python, line 1"),
    "axes as a list": ({"axes": [1]}, "axes must be an object, not [1]"),
}  # fmt: skip


@pytest.mark.parametrize("changes, complaint", FAULTS.values(), ids=FAULTS)
def test_a_fault_of_a_problem_is_named_in_one_sentence(changes, complaint):
    with pytest.raises(UsageError) as error:
        workload(**changes)
    assert complaint in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"name": NaN}', "[" * 100_000])
def test_what_is_no_json_object_is_refused(text):
    with pytest.raises(UsageError):
        FolderWorkload("saxpy", text)


def test_a_folder_that_is_not_there_or_not_whole_says_what_to_do(tmp_path):
    with pytest.raises(UsageError, match=f"evoengine new {tmp_path}/nothing writes one"):
        load_folder(tmp_path / "nothing")
    folder = saxpy(tmp_path)
    (folder / "space.toml").unlink()
    with pytest.raises(UsageError, match=r"there is no .*space\.toml; a kernel's folder holds problem\.json"):
        load_folder(folder)


# --- the gate's cases


def sizes(found: FolderWorkload, problem: str, config: dict[str, Any]) -> list[int]:
    return [case.problem.axes["n"] for case in found.cases(found.parse(problem), config)]


def test_sizes_stand_around_what_the_grid_divides_by():
    found = sizes(workload(), "n=100000", {"family": "saxpy", "block_size_x": 64, "per_thread": 2})
    assert {1, 127, 128, 129, 2 * 128 + 2} <= set(found)


def test_no_case_is_larger_than_the_problem():
    assert max(sizes(workload(), "n=40", {"block_size_x": 64, "per_thread": 2})) == 40


def test_cases_keep_constraints_of_the_problem_and_the_sizes_that_a_configuration_takes():
    assert all(
        n % 4 == 0 for n in sizes(workload(constraints=["n % 4 == 0"]), "n=4096", {"block_size_x": 32, "per_thread": 1})
    )
    rule = '[[constraint]]\nexpr = "n % block_size_x == 0"\nwhy = "whole blocks"\n'
    kept = workload(space=SAXPY_SPACE.replace("[launch]", rule + "[launch]"))
    assert all(n % 32 == 0 for n in sizes(kept, "n=4096", {"block_size_x": 32, "per_thread": 1}))
    large = '[[constraint]]\nexpr = "n >= 100000 or per_thread == 1"\nwhy = "faster"\n'
    any_size = workload(space=SAXPY_SPACE.replace("[launch]", large + "[launch]"))
    assert 1 in sizes(any_size, "n=200000", {"block_size_x": 32, "per_thread": 2})


def test_an_axis_that_a_constraint_fixes_follows_the_others():
    axes = {"n": {"type": "var"}, "ends": {"type": "var"}}
    found = workload(
        axes=axes, constraints=["ends == n + 1"], inputs={"x": X, "ends_of": {"shape": ["ends"], "dtype": "int32"}},
        reference="def run(x, ends_of):\n    return x\n", workloads=[{"axes": {"n": 64, "ends": 65}}],
    )  # fmt: skip
    cases = found.cases(found.parse(found.example), {"tile": 16})
    assert len({c.problem for c in cases}) > 3
    assert all(c.problem.axes["ends"] == c.problem.axes["n"] + 1 for c in cases)


def test_axes_in_the_kernels_text_keep_the_problems_sizes():
    found = workload(compile_time=["n"])
    assert set(sizes(found, "n=300", {"block_size_x": 64})) == {300}


def test_adversarial_draws_come_with_the_sizes():
    assert {"zeros", "one-hot", "large", "negative"} <= {
        c.draw for c in workload().cases(workload().parse("n=300"), {})
    }


def test_the_folders_own_cases_take_the_place_of_these():
    own = [
        {"name": "tiny", "axes": {"n": 3}},
        {"name": "cold", "draw": "zeros"},
        {"name": "odd", "draw": {"x": {"type": "ones"}}},
    ]
    found = workload(cases=own)
    cases = found.cases(found.parse("n=300"), {"block_size_x": 64})
    assert [(c.name, c.draw, c.problem.axes["n"]) for c in cases] == [
        ("tiny", "normal", 3), ("cold", "zeros", 300), ("odd", "case odd", 300),
    ]  # fmt: skip
    drawn = found.tensors().draw(cases[2], seed=1).inputs
    assert bool((drawn["x"] == 1).all()) and not bool((drawn["y"] == 1).all())


def test_the_gate_of_a_large_folder_stays_small():
    axes = {"m": {"type": "var"}, "n": {"type": "var"}, "k": {"type": "var"}}
    matrix = {"a": {"shape": ["m", "k"], "dtype": "float16"}, "b": {"shape": ["k", "n"], "dtype": "float16"}}
    found = workload(
        axes=axes, inputs=matrix, outputs={"c": {"shape": ["m", "n"], "dtype": "float16"}}, flops="2 * m * n * k", space="",
        reference="def run(a, b):\n    return a @ b\n", workloads=[{"axes": dict.fromkeys(axes, 8192)}],
    )  # fmt: skip
    cases = found.cases(found.parse(found.example), {"tile_m": 256, "tile_n": 256, "tile_k": 64})
    assert all(found.flops(case.problem) / 4 <= 1 << 20 for case in cases)
