"""Texts that a program proposes: judged as a search's candidates are, kept with their lineage, and never trusted."""

from __future__ import annotations

import json
import shlex
import sys
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest

import evoengine
from evoengine import workloads
from evoengine.errors import UsageError
from evoengine.ledger.store import open_ledger
from evoengine.records import Outcome
from evoengine.sandbox import jail
from evoengine.tuning import proposals
from evoengine.tuning.proposals import Proposals, kernel_of
from evoengine.tuning.propose import Proposer
from evoengine.tuning.propose import propose as propose_within
from evoengine.tuning.verify import verify
from tests.support.exhaustive import more
from tests.support.folders import write
from tests.tuning import rule_proposer

pytestmark = pytest.mark.skipif(jail.why_no_jail() is not None, reason=str(jail.why_no_jail()))

propose = partial(propose_within, proposals=20, timeout=600.0)
PROBLEM = {
    "name": "scale",
    "axes": {"rows": {"type": "var"}, "cols": {"type": "var"}},
    "inputs": {
        "x": {"shape": ["rows", "cols"], "dtype": "float32"},
        "bias": {"shape": ["cols"], "dtype": "float32"},
        "alpha": {"shape": None, "dtype": "float32"},
    },
    "outputs": {"out": {"shape": ["rows", "cols"], "dtype": "float32"}},
    "reference": "def run(x, bias, alpha):\n    return alpha * x + bias\n",
    "workloads": [
        {"axes": {"rows": 2048, "cols": 1024}, "inputs": {"alpha": {"type": "scalar", "value": 0.5}}},
    ],
    "constraints": ["cols % 4 == 0"],
}
SPACE = """kernel = "scale"
[knobs]
block = [128, 64]
[launch]
threads = "block"
grid = ["rows", 1, 1]
shared = 0
"""
TEXT = """#define VECTOR 1
struct __align__(4 * VECTOR) Chunk { float at[VECTOR]; };

extern "C" __global__ void scale(const float* __restrict__ x, const float* __restrict__ bias, float alpha,
                                 float* __restrict__ out, int rows, int cols) {
    const int first_row = blockIdx.x;
    const long long begin = (long long)first_row * cols;
    #pragma unroll 1
    for (int col = threadIdx.x * VECTOR; col < cols; col += block * VECTOR) {
        const Chunk in = *reinterpret_cast<const Chunk*>(x + begin + col);
        const Chunk add = *reinterpret_cast<const Chunk*>(bias + col);
        Chunk result;
        for (int i = 0; i < VECTOR; ++i) result.at[i] = alpha * in.at[i] + add.at[i];
        *reinterpret_cast<Chunk*>(out + begin + col) = result;
    }
}
"""
BODY = "    const int first_row = blockIdx.x;\n"
"""the first line of the kernel's body"""

EXPLOITS = {
    "returns early where it is timed": (BODY, f"    if (rows >= 2048) return;\n{BODY}"),
    "returns early in a large grid": (BODY, f"    if (gridDim.x > 512) return;\n{BODY}"),
    "computes half of the rows of a large problem": (BODY, f"    if (rows > 512 && (blockIdx.x & 1)) return;\n{BODY}"),
    "does nothing from its second launch on": (
        BODY,
        f"    if (blockIdx.x == 0 && threadIdx.x == 0) ++launches;\n    if (launches > 1) return;\n{BODY}",
    ),
    "answers with what it computed before": (
        "        *reinterpret_cast<Chunk*>(out + begin + col) = result;\n",
        "        if (kept == 0.0f) kept = result.at[0];\n        out[begin + col] = kept;\n",
    ),
    "sniffs its input": (BODY, f"    if (x[0] != 0.0f && x[0] < 0.3f) return;\n{BODY}"),
    "leaves out a factor that is often 1": ("alpha * in.at[i]", "in.at[i]"),
    "writes a constant": ("alpha * in.at[i] + add.at[i]", "0.0f"),
    "follows the clock": (BODY, f"    if (clock64() & 64) return;\n{BODY}"),
    "follows the place of its block": (
        BODY,
        f'    unsigned sm;\n    asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));\n    if (sm > 80) return;\n{BODY}',
    ),
    "reads beyond the row": ("col < cols;", "col < cols + block;"),
    "changes its input": (BODY, f"    const_cast<float*>(x)[threadIdx.x] = 0.0f;\n{BODY}"),
    "forges the answer of the emulator's process": (
        "struct __align__",
        'extern "C" { long write(int, const void*, unsigned long); void _exit(int); }\n'
        "__attribute__((constructor)) static void forge() {\n"
        "    static char zero[1 << 16];\n    write(1, zero, 65536);\n    _exit(0);\n}\n"
        "struct __align__",
    ),
    "replaces a function of the emulator": (
        "struct __align__",
        "namespace evo_emu { void write_all(const void*, unsigned long) {} }\nstruct __align__",
    ),
    "includes a file of the user's": ("struct __align__", '#include "/etc/passwd"\nstruct __align__'),
    "includes the ledger": ("struct __align__", '#include "{ledger}"\nstruct __align__'),
    "holds Python for Triton": ("struct __align__", "struct __align__"),
}
ALSO_OF_FOLDERS = (
    "returns early in a large grid", "computes half of the rows of a large problem", "reads beyond the row",
)  # fmt: skip
"""faults that the gate of kernels of users' own is tested with as well"""
OF_ANOTHERS_KIND = (
    "answers with what it computed before", "writes a constant", "follows the place of its block",
    "includes the ledger",
)  # fmt: skip
"""exploits beside one that is found in the same way"""
ALSO_WRONG = ("forges the answer of the emulator's process", "replaces a function of the emulator")
"""exploits that pass nothing by themselves, and are tried with a wrong kernel"""
STATICS = "__device__ int launches;\n__device__ float kept;\n"


def exploit(name: str, right: str, ledger: Path) -> str:
    old, new = EXPLOITS[name]
    assert old in right
    text = STATICS + right.replace(old, new.replace("{ledger}", str(ledger)), 1)
    if name in ALSO_WRONG:
        text = text.replace("alpha * in.at[i]", "in.at[i]")
    if name == "holds Python for Triton":
        from evoengine.workloads.triton_kernel import LAST_LINE

        text = f"open('{ledger}.stolen', 'w')\n\n{LAST_LINE}{json.dumps({'gpu': 'h100', 'config': {}})}\n"
    return text


@pytest.fixture
def folder(tmp_path) -> Path:
    return write(tmp_path, PROBLEM, SPACE, TEXT)


def program(folder: Path, text: str) -> str:
    """The command of a proposer with that Python text."""
    (folder.parent / "proposer.py").write_text(text)
    return f"{shlex.quote(sys.executable)} {shlex.quote(str(folder.parent / 'proposer.py'))}"


def recorded(folder: Path, *answers: object) -> str:
    """The command of a proposer that prints recorded answers, one for each request."""
    (folder.parent / "answers.json").write_text(json.dumps(answers))
    where = str(folder.parent / "answers.json")
    return program(
        folder,
        f"import json, sys\nfor answer in json.load(open({where!r})):\n"
        "    sys.stdin.readline()\n    print(answer if isinstance(answer, str) else json.dumps(answer),"
        " flush=True)\n",
    )


@pytest.fixture(scope="module")
def proposing(tmp_path_factory):
    """A run with its parent, the kernel's own text."""
    place = tmp_path_factory.mktemp("exploits")
    own = write(place, PROBLEM, SPACE, TEXT)
    with patch.dict(workloads._registered):  # tests/conftest.py cleans up behind a test, not behind a module's fixture
        first = propose(recorded(own), gpu="h100", kernel=own, db=place / "a.db")
    with open_ledger(str(place / "a.db"), create=False) as ledger:
        parent = ledger.candidate(first.best[0].trial, with_cubin=True)
        with Proposals(ledger, kernel_of(ledger, parent)) as run:
            yield run, parent, place


IN_SHORT = [name for name in EXPLOITS if name not in ALSO_OF_FOLDERS + OF_ANOTHERS_KIND]


OF_THE_TEXT = (
    "forges the answer of the emulator's process", "replaces a function of the emulator",
    "includes a file of the user's", "includes the ledger", "holds Python for Triton",
)  # fmt: skip
"""exploits of what handles the text; the gate alone finds the others, as it does outside of a jail"""


@pytest.mark.parametrize("name", [*IN_SHORT, *more(ALSO_OF_FOLDERS + OF_ANOTHERS_KIND)])
def test_no_exploit_is_ranked(proposing, monkeypatch, name):
    run, parent, place = proposing
    if name not in (*OF_THE_TEXT, "leaves out a factor that is often 1"):
        monkeypatch.setattr(proposals, "MARK", "")
    found = run.propose(parent, exploit(name, parent.source.text, place / "a.db"))
    assert found.outcome is not None and not found.outcome.ranked, f"{name} passed as {found.outcome}"
    assert found.reason and not (place / "a.db.stolen").exists()


def test_the_text_of_the_exploits_is_right_without_them(proposing):
    run, parent, _ = proposing
    assert run.propose(parent, STATICS + parent.source.text).outcome is Outcome.ESTIMATED


def test_a_proposal_keeps_launch_and_parent_and_can_be_verified_and_exported(proposing, tmp_path):
    run, parent, place = proposing
    faster = rule_proposer.vectorise(rule_proposer.vectorise(parent.source.text))
    found = run.propose(parent, faster)
    assert found.parents == (parent.trial,) and found.operator == "proposal"
    assert found.source.launch == parent.source.launch and found.config == parent.config
    assert found.measurement.compared_us < parent.measurement.compared_us
    assert verify(found.trial, db=place / "a.db").correct
    exported = evoengine.export(tmp_path / "out", db=place / "a.db")
    assert "#define VECTOR 4" in (tmp_path / "out" / "kernel.cu").read_text() and exported


def test_rules_find_a_faster_kernel_and_a_race_is_refused(folder, tmp_path):
    told = []
    command = program(folder, Path(rule_proposer.__file__).read_text())
    found = propose(command, gpu="h100", kernel=folder, db=tmp_path / "r.db", proposals=2, on_trial=told.append)
    assert found.judged == 2 and found.best[0].measurement.compared_us < told[0].measurement.compared_us
    staged = [c for c in told if c.source and "__shared__" in c.source.text]
    assert staged and all(not c.outcome.ranked and "nothing orders the two" in c.reason for c in staged)


ECHOES = """import json, sys
first = json.loads(sys.stdin.readline())
print(json.dumps({"text": first["parent"]["text"].replace("alpha * in", "in")}), flush=True)
second = json.loads(sys.stdin.readline())
print(json.dumps({"text": "//" + json.dumps([first, second])}), flush=True)
"""
"""proposes a wrong kernel, and then a text that holds the requests"""


def test_a_request_tells_verdict_counterexample_profile_and_prediction_and_no_seed(folder, tmp_path):
    found = propose(program(folder, ECHOES), gpu="h100", kernel=folder, db=tmp_path / "t.db")
    with open_ledger(str(tmp_path / "t.db"), create=False) as ledger:
        trials = [t.trial for t in ledger.trials(run=found.run)]
        said = ledger.candidate(trials[-1]).source.text
        seeds = {case.seed for trial in trials for verdict in ledger.verdicts(trial) for case in verdict.cases}
    first, second = json.loads(said.removeprefix(jail.MARK).removeprefix("//"))
    assert first["parent"]["predicted_us"] > 0 and first["last"] is None and first["proposals_left"] == 20
    assert any("waiting" in name for name in first["parent"]["profile"])
    assert second["last"]["outcome"] == "incorrect" and "alpha * in" not in second["last"]["text"]
    assert second["last"]["counterexample"]["problem"].startswith("scale:rows=")
    assert second["parent"] == first["parent"]
    assert seeds and not any(str(seed) in said for seed in seeds)


BAD = {
    "prints rubbish": ("print('rubbish', flush=True)", "3 consecutive answers without a proposal.*not JSON"),
    "prints a list": ("print('[]', flush=True)", "answer must be an object"),
    "prints a number for a text": ("print('{\"text\": 7}', flush=True)", "must hold the kernel's text"),
    "floods": ("sys.stdout.write('x' * 9_000_000)", "longer than 8 MiB"),
    # at once: answers that come one by one may each be read behind the next request
    "answers twice": (r"print('{}\n{}', flush=True)", "without a request"),
    "hangs": ("import time; time.sleep(600)", "no answer within 2 s"),
    "fails": ("sys.exit(3)", "ended with exit code 3"),
    "writes elsewhere": ("open({elsewhere!r}, 'w')", "ended with exit code 1"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_program_that_does_not_answer_is_refused(name, tmp_path):
    does, sentence = BAD[name]
    does = does.replace("{elsewhere!r}", repr(str(tmp_path / "elsewhere")))
    command = program(tmp_path / "x", f"import sys\nfor line in sys.stdin:\n    {does}\n")
    seconds = 2 if name == "hangs" else 60
    with pytest.raises(UsageError, match=sentence), Proposer(command, seconds) as proposer:
        from evoengine.tuning.propose import Dialogue

        dialogue = Dialogue.__new__(Dialogue)
        dialogue._proposer, dialogue._wanted, dialogue.judged = proposer, 5, 0
        dialogue._on_stage, dialogue._request = lambda stage: None, lambda error: {"error": error}
        dialogue.run_to_end()
    assert not (tmp_path / "elsewhere").exists()


def test_what_was_judged_before_a_program_failed_is_kept(folder, tmp_path):
    with pytest.raises(UsageError, match="3 consecutive answers"):
        propose(recorded(folder, {"text": "not CUDA"}, "a", "b", "c"), gpu="h100", kernel=folder, db=tmp_path / "k.db")
    with open_ledger(str(tmp_path / "k.db"), create=False) as ledger:
        (run,) = ledger.runs()
        assert run.status.startswith("stopped: the program gave 3 consecutive answers")
        assert [t.outcome for t in ledger.trials(run=run.id)] == [Outcome.ESTIMATED, Outcome.UNCOMPILABLE]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"proposals": 0}, "must be above 0"),
        ({"command": " "}, "takes a shell command"),
        ({"start": 1, "problem": "scale:rows=8,cols=8"}, "leave --problem, --kernel and --gpu out"),
    ],
)
def test_bad_arguments_write_nothing(folder, tmp_path, given, sentence):
    with pytest.raises(UsageError, match=sentence):
        propose(**{"command": "cat", "kernel": None if "start" in given else folder, "db": tmp_path / "n.db"} | given)
    assert not (tmp_path / "n.db").exists()
