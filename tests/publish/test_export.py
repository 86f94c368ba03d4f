"""What is exported can be run and checked by somebody who has nothing of evoengine."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from evoengine.publish.export import describe, export
from evoengine.records import Binary, Candidate, CaseResult, Kind, Launch, Measurement, Outcome, Source, Verdict
from tests.support.kernel_gate import attention_target

TARGET = attention_target("b2,h4,s100,d64,fp16,kv2")
CASE = CaseResult("one row", "attention:b1,h1,s1,d64,fp16", 5, True, 1e-4, 1e-5, 1e-3)


@pytest.fixture
def candidate() -> Candidate:
    return Candidate(
        trial=3, run=1, problem="attention:b2,h4,s100,d64,fp16,kv2", gpu="h100",
        config={"family": "wmma", "tile_m": 64},
        outcome=Outcome.ESTIMATED, device="emulator",
        source=Source("// text", "attention", Launch((2, 4, 2), 128, 1024, (8, 1))),
        binary=Binary(b"\x7fELF", "sm_90a", "-arch=sm_90a", "nvrtc 13.5", 64, 0, 0, 16, (), {"HMMA": 8}, 300.0),
        verdict=Verdict("emulator", None, None, (CASE,), 100.0),
        measurement=Measurement(Kind.ESTIMATED, "estimate for h100", 100.0, 50.0), occupancy=0.25,
    )  # fmt: skip


def test_the_files_are_the_candidates_own(candidate, tmp_path):
    paths = export(candidate, TARGET, tmp_path / "new" / "folder", beside={"trace.json": b"{}"})
    described = describe(candidate, TARGET)
    assert [p.name for p in paths] == [
        "kernel.cu", "kernel.cubin", "kernel.json", f"{described['module']}.py", "_cuda.py", "README.md", "trace.json",
        "SHA256SUMS",
    ]  # fmt: skip
    text, cubin, written, *_ = (p.read_bytes() for p in paths)
    assert (text, cubin) == (b"// text", b"\x7fELF")
    assert json.loads(written) == described
    assert re.fullmatch("attention_b2_h4_s100_d64_fp16_kv2_[0-9a-f]{12}", described["module"])


@pytest.mark.parametrize(("folder", "package"), [("", ""), ("..", "kernel_d64.")])
def test_it_is_imported_from_within_and_by_the_folders_name(candidate, tmp_path, folder, package):
    export(candidate, TARGET, tmp_path / "kernel_d64")
    script = f"""
import sys
sys.path.insert(0, {str(tmp_path / "kernel_d64" / folder)!r})
from {package}{describe(candidate, TARGET)["module"]} import attention
print(attention.__name__, {{"torch", "cupy", "evoengine"}} & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-I", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "attention set()\n"


def test_the_name_is_that_of_what_runs_and_changes_with_it_alone(candidate):
    def name(changed: Candidate) -> object:
        return describe(changed, TARGET)["module"]

    source, binary = candidate.source, candidate.binary
    same = [replace(candidate, trial=9, run=4), replace(candidate, measurement=None), replace(candidate, verdict=None)]
    assert {name(c) for c in same} == {name(candidate)}
    others = [
        replace(candidate, config={"family": "wmma", "tile_m": 32}),
        replace(candidate, source=replace(source, launch=Launch((2, 4, 2), 128, 2048, (8, 1)))),
        replace(candidate, binary=replace(binary, cubin=b"\x7fELF2")),
    ]
    assert len({name(c) for c in (candidate, *others)}) == 4


def test_the_metadata_states_launch_resources_verdict_and_provenance(candidate):
    found = describe(candidate, TARGET)
    assert found["launch"] == {
        "grid": [2, 4, 2],
        "threads": 128,
        "block": [16, 8, 1],
        "shared_bytes": 1024,
        "grid_by_sms": {},
    }
    assert found["resources"]["registers"] == 64
    assert found["verdict"]["cases"][0]["seed"] == 5
    assert found["provenance"]["source_sha256"] == candidate.source.sha256
    assert found["figure"]["kind"] == "estimated"


def test_the_metadata_is_json_all_the_way_down(candidate):
    assert json.loads(json.dumps(describe(candidate, TARGET))) == describe(candidate, TARGET)
