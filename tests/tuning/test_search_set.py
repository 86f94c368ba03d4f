"""Several problems at once: what may be given, and a search whose table has passed the whole gate on each problem."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from evoengine.cli.main import evoengine as commands
from evoengine.errors import UsageError
from evoengine.ledger.store import open_ledger
from evoengine.search.finishing import is_judged
from evoengine.tuning.search import SearchOptions
from evoengine.tuning.tune import SetSearch
from evoengine.workloads import expand

SMALL, WIDE = "rms_norm:rows64,hidden256,fp32", "rms_norm:rows64,hidden512,fp32"


def test_a_named_set_and_the_lines_of_a_file_are_its_problems_each_once(tmp_path):
    file = tmp_path / "shapes.txt"
    file.write_text("# of a layer\ngemm:m16,n4096,k4096,bf16,b_nk\n\ngemm:k64,n64,m64,fp16  # small\ngemm:llama3-8b\n")
    found = expand([f"@{file}", "gemm:m64,n64,k64,fp16"])
    assert found[:2] == ("gemm:m16,n4096,k4096,bf16,b_nk", "gemm:m64,n64,k64,fp16")
    assert len(found) == len(set(found)) == 2 + len(expand(["gemm:llama3-8b"])) - 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no problem; write one a line"),
        ("@other.txt", "names a file, @other.txt; it takes problems and named sets"),
        ("# small\ngemm:m1", "line 2 of .*shapes.txt: .* does not give"),
        ("gemm:llama3-9b", "line 1 of .*shapes.txt: .* no named set; did you mean gemm:llama3-8b"),
        (f"{SMALL}\ngemm:m1,n1,k1,fp16", "are of one workload, and these are of rms_norm and gemm"),
    ],
)
def test_a_file_that_holds_no_problems_of_one_workload_is_refused(tmp_path, text, said):
    file = tmp_path / "shapes.txt"
    file.write_text(text)
    with pytest.raises(UsageError, match=said):
        expand([f"@{file}"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("search", "--problem", SMALL, "--kernels", "2"), "--kernels requires several problems"),
        (("best", "--problem", SMALL, "--kernels", "2"), "--kernels requires several problems"),
        (("search", "--problem", SMALL, "--problem", WIDE, "--resume"), "--resume applies to one problem"),
        (("search", "--problem", SMALL, "--problem", WIDE, "--minutes", "1"), "--minutes applies to one problem"),
        (("search", "--problem", "@/dev/zero"), "/dev/zero cannot be read: it is not a regular file"),
        (("search", "--problem", "@nowhere.txt"), "nowhere.txt cannot be read: No such file or directory"),
        (("best", "--problem", SMALL, "--problem", WIDE, "--top", "3"), "--top applies to one problem"),
    ],
)
def test_what_is_of_one_problem_is_refused_of_several(tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(commands, arguments)
    assert isinstance(done.exception, UsageError) and said in str(done.exception)
    assert not list(tmp_path.iterdir())


@pytest.mark.exhaustive
def test_one_kernel_serves_both_problems_and_has_passed_the_gate_on_each(tmp_path):
    db = str(tmp_path / "ledger.db")
    options = SearchOptions(gpu="a100", device="emulator", trials=2, seed=1, jobs=1, db=db)
    found = SetSearch(options, [SMALL, WIDE], 1).run().table
    assert found is not None and len(found.kernels) == 1
    assert [s.problem for s in found.served] == [SMALL, WIDE]
    assert found.worst.regret >= found.mean_regret >= 0
    with open_ledger(db, create=False) as ledger:
        assert [run.problem for run in ledger.runs()] == [SMALL, WIDE]
        assert all(is_judged(ledger.verdicts(s.candidate.trial)) for s in found.served)
