"""A Triton kernel that the server's operator put into EVOENGINE_KERNELS is searched by a job, as any other kernel."""

from __future__ import annotations

import json

import pytest

from evoengine.errors import UsageError
from tests.service.conftest import running
from tests.support.machine_code import require_tools

KERNEL = """
import torch, triton, triton.language as tl


@triton.autotune([triton.Config({"BLOCK": 128}), triton.Config({"BLOCK": 256})], key=["n"])
@triton.jit
def double(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, 2 * tl.load(x + at, mask=at < n), mask=at < n)


def call(n=1000):
    double[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](torch.randn(n), torch.empty(n), n)


def reference(x):
    return 2 * x
"""


@pytest.mark.exhaustive
def test_a_job_searches_an_operators_triton_kernel(tmp_path):
    pytest.importorskip("triton", reason="Triton is not installed")
    require_tools()
    folder = tmp_path / "kernels" / "double"
    folder.mkdir(parents=True)
    (folder / "double.py").write_text(KERNEL, "utf-8")
    stated = {"file": "double.py", "kernel": "double", "call": "call", "reference": "reference"}
    (folder / "triton.json").write_text(json.dumps(stated), "utf-8")
    named = {"db": tmp_path / "evo.db", "kernels": folder.parent}
    with running(tmp_path, **named) as server, server.client() as client:
        with pytest.raises(UsageError, match="double is a Triton kernel, which is not timed"):
            client.submit(problems=["double:n=500"], gpu="h100", trials=3, device="cuda")
        job = client.submit(problems=["double:n=500"], gpu="h100", trials=3)
        events = list(client.events(job.id, patience=600.0))
        assert client.job(job.id).state == "done", events
        best = client.best(problem="double:n=500", gpu="h100")
    assert best["config"]["BLOCK"] in (64, 128, 256, 512) and best["outcome"] == "estimated"
