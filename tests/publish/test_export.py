"""What is exported can be run and checked by somebody who has nothing of evoengine."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from evoengine.errors import UsageError
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
    paths = export(candidate, TARGET, tmp_path / "new" / "folder")
    assert [p.name for p in paths] == [
        "kernel.cu",
        "kernel.cubin",
        "kernel.json",
        "attention.py",
        "_cuda.py",
        "__init__.py",
    ]
    text, cubin, described, *_ = (p.read_bytes() for p in paths)
    assert (text, cubin) == (b"// text", b"\x7fELF")
    assert json.loads(described) == describe(candidate, TARGET)


@pytest.mark.parametrize(
    ("folder", "statement"), [("", "from attention import attention"), ("..", "from kernel_d64 import attention")]
)
def test_it_is_imported_from_within_and_as_a_package_of_the_folders_name(candidate, tmp_path, folder, statement):
    export(candidate, TARGET, tmp_path / "kernel_d64")
    script = f"""
import sys
sys.path.insert(0, {str(tmp_path / "kernel_d64" / folder)!r})
{statement}
print(attention.__name__, {{"torch", "cupy", "evoengine"}} & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-I", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "attention set()\n"


def test_a_package_that_is_there_stays_as_it_is(candidate, tmp_path):
    (tmp_path / "__init__.py").write_text("# somebody's own\n")
    for _ in range(2):
        export(candidate, TARGET, tmp_path)
    assert (tmp_path / "__init__.py").read_text() == "# somebody's own\n"


def test_the_metadata_states_launch_resources_verdict_and_provenance(candidate):
    found = describe(candidate, TARGET)
    assert found["launch"] == {"grid": [2, 4, 2], "threads": 128, "block": [16, 8, 1], "shared_bytes": 1024}
    assert found["resources"]["registers"] == 64
    assert found["verdict"]["cases"][0]["seed"] == 5
    assert found["provenance"]["source_sha256"] == candidate.source.sha256
    assert found["figure"]["kind"] == "estimated"


def test_the_metadata_is_json_all_the_way_down(candidate):
    assert json.loads(json.dumps(describe(candidate, TARGET))) == describe(candidate, TARGET)


def test_a_folder_that_cannot_be_written_is_one_sentence(candidate, tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(UsageError, match="cannot write to"):
        export(candidate, TARGET, tmp_path / "taken")
