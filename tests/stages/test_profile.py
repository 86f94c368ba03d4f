"""The page of what limits a kernel: from Nsight Compute's CSV, from the binary, and what the sanitizers say."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from evoengine.gpu import find_gpu
from evoengine.records import Binary, CompiledCandidate, Launch, Profile, Source
from evoengine.stages.profile import COUNTERS, ToolFailed, profile, read_csv, read_sanitizer, shares, static_profile
from evoengine.workloads import parse_problem
from evoengine.workloads.base import Target

H100 = find_gpu("h100")
TARGET = Target(*parse_problem("b1,h2,s128,d32,fp16"), H100)
MIX = {"HMMA": 40, "MUFU": 10, "FFMA": 20, "LDSM": 10, "LDGSTS": 5, "BAR": 5, "MOV": 10}
STALLS = {
    "long_scoreboard": "4.50", "barrier": "1,234.5", "wait": "0.5", "selected": "9.0", "math_pipe_throttle": "2.0",
}  # fmt: skip


def contender(mix=None, spill=0):
    source = Source("//", "attention", Launch((4, 2, 1), 128, 40960))
    binary = Binary(b"\x7fELF", "sm_90a", "", "nvrtc", 96, spill, 0, 0, (), MIX if mix is None else mix, 1.0)
    return CompiledCandidate(7, source, binary)


def raw_page(values="12.5", stalls=STALLS) -> str:
    names = [*COUNTERS.values(), *(f"smsp__average_warps_issue_stalled_{s}_per_issue_active.ratio" for s in stalls)]
    header = ["ID", "Kernel Name", *names]
    numbers = ["0", "attention", *([values] * len(COUNTERS)), *stalls.values()]
    rows = [header, [""] * len(header), numbers]
    return "==PROF== Connected\n" + "\n".join(",".join(f'"{cell}"' for cell in row) for row in rows) + "\n"


def test_counters_and_the_top_stalls_are_read_by_name():
    found = read_csv(raw_page())
    assert found["tensor pipe %"] == found["DRAM throughput %"] == 12.5
    stalled = [name for name in found if name.startswith("stalled")]
    assert [s.split(",")[0] for s in stalled] == [
        "stalled on barrier", "stalled on long scoreboard", "stalled on math pipe throttle", "stalled on wait",
    ]  # fmt: skip
    assert found[stalled[0]] == 1234.5


def test_a_counter_that_the_gpu_lacks_is_left_out():
    assert "tensor pipe %" not in read_csv(raw_page(values="n/a"))


@pytest.mark.parametrize("text", ["", "==ERROR== No kernels were profiled\n", '"ID","Kernel Name"\n'])
def test_no_counters_is_said_with_the_tools_own_words(text):
    with pytest.raises(ToolFailed, match="gave no counters: .+"):
        read_csv(text)


def test_the_static_page_counts_instructions_by_pipe_and_says_that_it_is_static():
    page = static_profile(contender(), H100)
    assert page.tool == "static"
    assert page.figures["tensor, % of instructions"] == 40.0
    assert page.figures["shared memory, % of instructions"] == 10.0
    assert page.figures["global memory, % of instructions"] == 5.0
    assert "not observed on a GPU" in page.remarks[0]
    assert sum(shares(MIX).values()) == pytest.approx(100)
    assert "spills" not in shares(MIX) and shares({"LDL": 1, "STL": 1}) == {"spills": 100.0}


def test_a_binary_without_a_known_mix_says_so():
    page = static_profile(contender(mix={}), H100)
    assert not any("instructions" in name for name in page.figures)
    assert "disassembler" in page.remarks[1]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n", "memcheck: clean"),
        ("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n", "memcheck: clean"),
        (
            "========= COMPUTE-SANITIZER\n========= Invalid __global__ write of size 2 bytes\n"
            "========= ERROR SUMMARY: 3 errors\n",
            "memcheck: ERROR SUMMARY: 3 errors; first: Invalid __global__ write of size 2 bytes",
        ),
        (
            "========= Race reported\n========= RACECHECK SUMMARY: 10 hazards displayed (10 errors, 0 warnings)\n",
            "memcheck: RACECHECK SUMMARY: 10 hazards displayed (10 errors, 0 warnings); first: Race reported",
        ),
        ("", "memcheck gave no summary: it said nothing"),
    ],
)
def test_the_sanitizers_word_fits_a_line(text, said):
    assert read_sanitizer("memcheck", text) == said


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """Puts commands of these names on the path, alone, each printing its text and noting its arguments and environment.

    Asked for what it can count, each prints LISTED.
    """

    def put(**texts):
        for name, text in texts.items():
            path = tmp_path / name.replace("_", "-")
            (tmp_path / f"{name}.txt").write_text(text)
            path.write_text(
                f"#!{sys.executable}\nimport json, os, sys\n"
                f"if '--query-metrics' in sys.argv: sys.exit(print({LISTED!r}))\n"
                f"call = json.dumps([sys.argv, dict(os.environ)])\n"
                f"open({str(tmp_path / name)!r} + '.json', 'a').write(call + '\\n')\n"
                f"print(open({str(tmp_path / (name + '.txt'))!r}).read())\n"
            )
            path.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        return lambda name: [json.loads(line) for line in (tmp_path / f"{name}.json").read_text().splitlines()]

    return put


CLEAN = "========= ERROR SUMMARY: 0 errors"
ABSENT = "sm__inst_executed_pipe_xu"
LISTED = "Device NVIDIA H200 (GH100)\n-----\nMetric Name      Metric Type   Metric Description\n" + "".join(
    f"{metric.partition('.')[0]}      Counter   # of events\n" for metric in COUNTERS.values() if ABSENT not in metric
)
"""all but one of the counters, as on a GPU that has no such pipe"""


def test_with_the_tools_counters_and_sanitizers_are_on_the_page(tools):
    calls = tools(ncu=raw_page(), compute_sanitizer=CLEAN)
    page = profile(TARGET, contender(), "NVIDIA H200", "GPU-a")
    assert (page.tool, page.device) == ("Nsight Compute", "NVIDIA H200")
    assert page.figures["MUFU pipe %"] == 12.5
    assert page.remarks == ("memcheck: clean", "racecheck: clean")
    [[command, environment]] = calls("ncu")
    assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-a"
    assert "PYTORCH_NO_CUDA_MEMORY_CACHING" not in environment
    assert command[command.index("--kernel-name") + 1] == "attention"
    assert command[command.index("--clock-control") + 1] == "none"
    assert "evoengine.timing.launch_once" in command


def test_only_counters_that_this_gpu_has_are_asked_for(tools):
    calls = tools(ncu=raw_page(), compute_sanitizer=CLEAN)
    profile(TARGET, contender(), "NVIDIA H200", "GPU-a")
    [[command, _]] = calls("ncu")
    asked = command[command.index("--metrics") + 1].split(",")
    assert set(COUNTERS.values()) - set(asked) == {m for m in COUNTERS.values() if m.startswith(ABSENT)}
    assert asked[-1].startswith("regex:smsp__average_warps_issue_stalled")


def test_under_the_sanitizers_torch_keeps_no_memory_so_that_bounds_are_seen(tools):
    calls = tools(ncu=raw_page(), compute_sanitizer=CLEAN)
    profile(TARGET, contender(), "NVIDIA H200", "GPU-a")
    for _, environment in calls("compute_sanitizer"):
        assert environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1"


def test_without_the_right_to_read_counters_the_page_is_static_and_says_why(tools):
    tools(ncu="==ERROR== ERR_NVGPUCTRPERM - The user does not have permission", compute_sanitizer=CLEAN)
    page = profile(TARGET, contender(), "NVIDIA H200", "GPU-a")
    assert page.tool == "static"
    assert any("ERR_NVGPUCTRPERM" in remark for remark in page.remarks)


def test_without_the_tools_the_page_is_static_and_names_them(tools):
    tools()
    page = profile(TARGET, contender(), "NVIDIA H200", "GPU-a")
    assert page.tool == "static"
    said = "\n".join(page.remarks)
    assert "ncu is not installed" in said and "memcheck was not run: compute-sanitizer is not installed" in said


def test_the_process_for_the_tools_says_what_it_lacks_without_a_gpu(tmp_path):
    import pickle

    from evoengine.devices.driver import find_driver

    if not isinstance(find_driver(), str):
        pytest.skip("this machine has a GPU")
    job = tmp_path / "job.pickle"
    job.write_bytes(pickle.dumps((TARGET, contender())))
    done = subprocess.run([sys.executable, "-m", "evoengine.timing.launch_once", job], capture_output=True, text=True)
    assert done.returncode != 0 and "CUDA" in done.stderr


def test_the_last_page_is_kept_beside_the_candidate(tmp_path):
    from evoengine.ledger.store import open_ledger
    from tests.support.ledger_examples import a_figure, add_ranked, start_run

    with open_ledger(str(tmp_path / "x.db"), create=True) as ledger:
        trial = add_ranked(ledger, start_run(ledger), a_figure(10.0))
        assert ledger.profile(trial) is None
        for value in (1.0, float("nan"), 2.5):
            page = Profile("static", "sm_90a binary", {"tensor %": value, "MUFU %": 3.0}, ("static",))
            ledger.record_profile(trial, page)
        assert ledger.profile(trial) == page
