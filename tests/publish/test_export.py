"""What is exported can be run and checked by somebody who has nothing of evoengine."""

from __future__ import annotations

import importlib.util
import json

import pytest
import torch

from evoengine.errors import UsageError
from evoengine.publish.export import LOADERS, describe, export
from evoengine.records import Binary, Candidate, CaseResult, Kind, Launch, Measurement, Outcome, Source, Verdict

CASE = CaseResult("one row", "attention:b1,h1,s1,d64,fp16", 5, True, 1e-4, 1e-5, 1e-3)


@pytest.fixture
def candidate() -> Candidate:
    return Candidate(
        trial=3, run=1, problem="attention:b2,h4,s100,d64,fp16,kv2", gpu="h100", config={"family": "wmma", "tile_m": 64},
        outcome=Outcome.ESTIMATED, device="emulator", source=Source("// text", "attention", Launch((2, 4, 2), 128, 1024)),
        binary=Binary(b"\x7fELF", "sm_90a", "-arch=sm_90a", "nvrtc 13.5", 64, 0, 0, 16, (), {"HMMA": 8}, 300.0),
        verdict=Verdict("emulator", None, None, (CASE,), 100.0),
        measurement=Measurement(Kind.ESTIMATED, "estimate for h100", 100.0, 50.0), occupancy=0.25,
    )  # fmt: skip


@pytest.fixture
def loader(candidate, tmp_path):
    export(candidate, tmp_path)
    spec = importlib.util.spec_from_file_location("exported_attention", tmp_path / "attention.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_files_are_the_candidates_own(candidate, tmp_path):
    paths = export(candidate, tmp_path / "new" / "folder")
    assert [p.name for p in paths] == ["kernel.cu", "kernel.cubin", "kernel.json", "attention.py"]
    text, cubin, described, _ = (p.read_bytes() for p in paths)
    assert (text, cubin) == (b"// text", b"\x7fELF")
    assert json.loads(described) == describe(candidate)


def test_the_metadata_states_launch_resources_verdict_and_provenance(candidate):
    found = describe(candidate)
    assert found["launch"] == {"grid": [2, 4, 2], "threads": 128, "shared_bytes": 1024}
    assert found["resources"]["registers"] == 64
    assert found["verdict"]["cases"][0]["seed"] == 5
    assert found["provenance"]["source_sha256"] == candidate.source.sha256
    assert found["figure"]["kind"] == "estimated"


def test_the_metadata_is_json_all_the_way_down(candidate):
    assert json.loads(json.dumps(describe(candidate))) == describe(candidate)


def test_the_loader_imports_nothing_of_evoengine():
    assert "import evoengine" not in (LOADERS / "attention.py").read_text()


def tensors(dtype=torch.float16, heads=4, kv_heads=2, head_dim=64, seq_k=100):
    q = torch.zeros(2, heads, 100, head_dim, dtype=dtype)
    k = torch.zeros(2, kv_heads, seq_k, head_dim, dtype=dtype)
    return q, k, k.clone()


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (tensors(dtype=torch.bfloat16), "compiled for float16"),
        (tensors(head_dim=32), "head_dim is 32"),
        (tensors(heads=3), "3 heads are no multiple of 2"),
        ((*tensors()[:2], tensors(seq_k=99)[2]), "v has shape"),
        ((tensors()[0].transpose(2, 3).contiguous().transpose(2, 3), *tensors()[1:]), "q is not contiguous"),
        ((*tensors()[:2], torch.zeros(25601).half()[1:].view(2, 2, 100, 64)), "v does not start at a multiple of 16"),
        ((*tensors()[:2], tensors()[2].to("meta")), "v is on meta and q on cpu"),
    ],
)
def test_the_loader_refuses_tensors_the_kernel_was_not_made_for(loader, given, names):
    with pytest.raises(ValueError, match=names):
        loader.attention(*given)


def test_a_folder_that_cannot_be_written_is_one_sentence(candidate, tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(UsageError, match="cannot write to"):
        export(candidate, tmp_path / "taken")
