"""Somebody's own reference: in float64 whatever it casts to, with torch or NumPy, and every fault of it in one
sentence."""

from __future__ import annotations

import json

import pytest
import torch

from evoengine.errors import UsageError
from evoengine.gpu import find_gpu
from evoengine.search.reference import require_reference
from evoengine.workloads.base import Case, Target
from evoengine.workloads.folder import FolderWorkload
from evoengine.workloads.folder_check import check_reference
from evoengine.workloads.folder_reference import NotDouble, run_in_float64
from tests.support.folders import SAXPY

INPUTS = {"a": {"type": "scalar", "value": 2.5}}


def workload(reference: str, **changes) -> FolderWorkload:
    return FolderWorkload("saxpy", json.dumps(SAXPY | {"reference": reference} | changes))


def computed(found: FolderWorkload, n: int = 64):
    """Inputs, the reference in float64, and as it is."""
    problem = found.parse(f"n={n}")
    tensors = found.tensors()
    inputs = tensors.draw(Case("any", problem), seed=3).inputs
    return inputs, tensors.reference(problem, inputs), tensors.own_dtype(problem, inputs)


CASTS = {
    "to": "return (a * x.to(torch.float16) + y).to(torch.float32)",
    "methods": "return (a * x.half().float() + y.bfloat16()).float()",
    "factories": "return torch.zeros(x.shape, dtype=torch.float16) + a * x + torch.zeros_like(y, dtype=torch.float16) + y",
    "keyword": "return torch.sum(torch.stack([a * x, y]), dim=0, dtype=torch.float32)",
    "type": "return (a * x.type(torch.float16) + y).type(torch.float32)",
}


@pytest.mark.parametrize("line", CASTS.values(), ids=CASTS)
def test_casts_inside_the_reference_do_not_reach_float64(line):
    inputs, exact, own = computed(workload(f"import torch\n\ndef run(x, y, a):\n    {line}\n"))
    expected = 2.5 * inputs["x"].double() + inputs["y"].double()
    assert exact["out"].dtype == torch.float64
    assert torch.allclose(exact["out"], expected, rtol=1e-14, atol=1e-14)
    assert own["out"].dtype == torch.float32


def test_torchs_default_dtype_is_as_before():
    computed(workload(SAXPY["reference"]))
    assert torch.get_default_dtype() == torch.float32


def test_a_numpy_reference_is_given_arrays_and_computes_in_float64():
    text = (
        "import numpy as np\n\ndef run(x, y, a):\n    assert isinstance(x, np.ndarray)\n    return np.add(a * x, y)\n"
    )
    inputs, exact, own = computed(workload(text))
    assert torch.equal(exact["out"], 2.5 * inputs["x"].double() + inputs["y"].double())
    assert own["out"].dtype == torch.float32


def test_what_does_not_compute_in_float64_is_compared_with_its_own_and_said():
    found = workload("import torch\n\ndef run(x, y, a):\n    assert x.dtype == torch.float32\n    return a * x + y\n")
    problem = found.parse("n=8")
    with pytest.raises(NotDouble):
        run_in_float64(found.definition, problem, found.tensors().draw(Case("any", problem), seed=1).inputs)
    _, exact, own = computed(found)
    assert torch.equal(exact["out"], own["out"].double())
    (remark,) = check_reference(found, problem)
    assert "does not compute in float64" in remark and "line 4: AssertionError" in remark and "rtol" in remark


def test_a_gate_that_would_be_slow_in_the_emulator_is_said_and_tried_at_one_size_only():
    slow = {"compile_time": ["n"], "flops": "1000000 * n", "workloads": [{"axes": {"n": 4096}, "inputs": INPUTS}]}
    found = workload(SAXPY["reference"], **slow)
    (remark,) = check_reference(found, found.parse("n=4096"))
    assert "the gate's smallest case is saxpy:n=4096, which is slow in the emulator" in remark
    assert check_reference(found, found.parse("n=64")) == ()


def test_outputs_may_be_a_dictionary_or_a_sequence():
    two = {"outputs": {"out": {"shape": ["n"], "dtype": "float32"}, "sum": {"shape": [], "dtype": "float32"}}}
    for returned in ('{"sum": x.sum(), "out": x}', "[x, x.sum()]", "(x, x.sum())"):
        found = workload(f"def run(x, y, a):\n    return {returned}\n", **two)
        inputs, _, own = computed(found)
        assert torch.equal(own["out"], inputs["x"]) and own["sum"].shape == ()


def test_draws_are_repeatable_and_as_stated():
    draws = {
        "a": {"type": "scalar", "value": 1.0},
        "x": {"type": "uniform", "low": 2, "high": "n"},
        "y": {"type": "constant", "value": 7},
    }
    found = workload(SAXPY["reference"], workloads=[{"axes": {"n": 50}, "inputs": draws}])
    problem = found.parse("n=50")
    first, second = (found.tensors().draw(Case("any", problem), seed=5).inputs for _ in range(2))
    assert torch.equal(first["x"], second["x"])
    assert float(first["x"].min()) >= 2 and 10 < float(first["x"].max()) <= 50
    assert bool((first["y"] == 7).all())


def test_a_pattern_under_which_the_reference_is_not_finite_is_drawn_as_usual():
    found = workload("def run(x, y, a):\n    return x / x\n")
    problem = found.parse("n=40")
    drawn = found.tensors().draw(Case("zeros", problem, "zeros"), seed=1).inputs
    assert not bool((drawn["x"] == 0).any())
    plain = workload(SAXPY["reference"]).tensors().draw(Case("zeros", problem, "zeros"), seed=1).inputs
    assert bool((plain["x"] == 0).all())


FAULTS = {
    "raises": ("def run(x, y, a):\n    z = x + 1\n    raise ValueError('no such luck')\n", "line 3: ValueError: no such luck"),
    "fails to load": ("import no_such_module\n\ndef run(x):\n    return x\n", "cannot be loaded: line 1: ModuleNotFoundError"),
    "ends the program": ("import sys\n\ndef run(x, y, a):\n    sys.exit(1)\n", "line 4: SystemExit"),
    "takes other inputs": ("def run(x):\n    return x\n", "TypeError: run() takes 1 positional argument but 3 were given"),
    "wrong shape": ("def run(x, y, a):\n    return x[:, None]\n", "out with the shape (1, 1) for saxpy:n=1; problem.json states (1,)"),
    "wrong dtype": ("def run(x, y, a):\n    return x.half()\n", "out as float16; problem.json states float32"),
    "too many outputs": ("def run(x, y, a):\n    return x, y\n", "returns 2 outputs; problem.json states 1: out"),
    "other names": ("def run(x, y, a):\n    return {'z': x}\n", "returns z; problem.json states out"),
    "nothing": ("def run(x, y, a):\n    pass\n", "returns as out a NoneType; it must be a torch tensor or a NumPy array"),
}  # fmt: skip


@pytest.mark.parametrize("reference, complaint", FAULTS.values(), ids=FAULTS)
def test_a_fault_of_the_reference_is_named_in_one_sentence(reference, complaint):
    found = workload(reference)
    with pytest.raises(UsageError) as error:
        check_reference(found, found.parse("n=64"))
    assert complaint in str(error.value) and "\n" not in str(error.value)


BREAKS_OUT = {
    "hangs": ("def run(x, y, a):\n    while True:\n        pass\n", "no end after 0.5 s", 0.5),
    "ends its process": (
        "import os\n\ndef run(x, y, a):\n    os._exit(3)\n",
        "the worker process died (exit code 3)",
        20.0,
    ),
}


@pytest.mark.parametrize("reference, complaint, seconds", BREAKS_OUT.values(), ids=BREAKS_OUT)
def test_a_reference_that_breaks_out_is_named_too(reference, complaint, seconds):
    found = workload(reference)
    target = Target(found, found.parse("n=64"), find_gpu("h100"))
    with pytest.raises(UsageError) as error:
        require_reference(target, print, seconds=seconds)
    assert "the reference of saxpy gives no outputs" in str(error.value) and complaint in str(error.value)


def test_a_good_reference_is_told_from_a_worker_without_a_word():
    found = workload(SAXPY["reference"])
    said: list[str] = []
    require_reference(Target(found, found.parse("n=64"), find_gpu("h100")), said.append)
    assert said == []
