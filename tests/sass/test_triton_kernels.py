"""Machine code that Triton's ptxas wrote: the executor computes what it should and reports no hazard and no race.

`python -m benchmarks.triton_binaries` makes the binaries again.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from evoengine.devices.base import KernelCall, ScalarArgument, ScratchArgument, TensorArgument
from evoengine.records import Launch
from evoengine.sass.core import Program
from evoengine.sass.cubin import read_kernel
from evoengine.sass.listing import disassemble
from evoengine.sass.rounds import Executable, run_rounds
from tests.support.exhaustive import representatives

FOLDER = Path(__file__).parent / "data" / "triton"
RECORDS = json.loads((FOLDER / "launches.json").read_text("utf-8"))
DTYPES = {"*fp32": np.float32, "*fp16": np.float16, "*i32": np.int32}
SCRATCH = ("partial", "lock")
OUTPUTS = ("out", "c_ptr", "Y_ptr")

REFERENCES = {
    "softmax": lambda x: torch.softmax(x, -1),
    "layer_norm": lambda x, gain: torch.nn.functional.layer_norm(x, x.shape[-1:], gain, eps=1e-5),
    "cumsum": lambda x: x.cumsum(-1),
    "sort": lambda x: x.sort(-1).values,
    "transpose": lambda x: x.t(),
    "matmul": lambda a, b: a @ b,
    "attention": lambda q, k, v: torch.softmax(q @ k.t() / 8, -1) @ v,
    "column_sums": lambda x: x.sum(0),
    "_swiglu_forward_kernel": lambda a, b: torch.nn.functional.silu(a) * b,
    "_softmax_single_block_forward_kernel": lambda x: torch.softmax(x, -1),
}


def arguments(record, rng):
    """The launch's arguments; the last two are memory that Triton's launcher passes and these kernels do not use."""
    found = []
    for name, kind, given in record["parameters"]:
        if name in SCRATCH:
            found.append(ScratchArgument(name, int(np.prod(given)) * 4, zeroed=name == "lock"))
        elif kind in DTYPES:
            values = rng.standard_normal(given).astype(DTYPES[kind])
            data = np.full(values.nbytes, 0xFF, np.uint8) if name in OUTPUTS else values
            found.append(TensorArgument(name, data, output=name in OUTPUTS))
        else:
            found.append(ScalarArgument(name, (np.float32 if kind == "fp32" else np.int32)(given)))
    assert record["scratch"] == 0
    return (*found, *(ScalarArgument(name, np.int64(0)) for name in ("global_scratch", "profile_scratch")))


CASES = [pytest.param(record, id=record["file"].removesuffix(".cubin.gz")) for record in RECORDS]


@pytest.mark.parametrize("record", representatives(CASES, "softmax_90", "column_sums_80"))
def test_the_executor_computes_what_the_kernel_should(record):
    cubin = gzip.decompress((FOLDER / record["file"]).read_bytes())
    assert hashlib.sha256(cubin).hexdigest() == record["sha256"]
    entry = record["entry"]
    program = Program(disassemble(cubin), entry)
    assert not program.unknown
    launch = Launch(tuple(record["grid"]), record["threads"], record["shared"])
    calls = [arguments(record, np.random.default_rng(seed)) for seed in (1, 2)]
    executables = {entry: Executable(read_kernel(cubin, entry), program)}
    done = run_rounds(executables, [[KernelCall(entry, launch, given)] for given in calls], 3)
    assert not any(done.unwritten.values())
    for given, after in zip(calls, done.tensors, strict=True):
        inputs = [torch.from_numpy(a.data).double() for a in given if isinstance(a, TensorArgument) and not a.output]
        expected = REFERENCES[record["kernel"]](*inputs)
        name, dtype = next((name, DTYPES[kind]) for name, kind, _ in record["parameters"] if name in OUTPUTS)
        found = torch.from_numpy(after[name].view(dtype).copy()).view(expected.shape).double()
        torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3)
