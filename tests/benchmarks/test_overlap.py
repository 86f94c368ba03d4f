"""The benchmark of how busy a GPU is kept: the search is real, and idle time is counted where there is some."""

from __future__ import annotations

import pytest

from benchmarks import overlap as benchmark


def test_idle_is_what_no_candidate_was_on_the_gpu_between_the_first_and_the_last(tmp_path):
    log = tmp_path / "log"
    log.write_text("10.0 11.0\n11.5 12.5\n12.5 14.0\n")
    assert benchmark.idle_share(log) == pytest.approx(0.5 / 4)


def test_a_search_runs_to_its_end_and_accounts_for_its_time(capsys):
    assert benchmark.main(["--compile", "0", "--gpu", "0.1", "--jobs", "1", "--trials", "5"]) == 0
    row = capsys.readouterr().out.splitlines()[-2]
    trials, seconds, busy, waiting, starting, idle = (cell.strip("% ") for cell in row.strip("│").split("│"))
    assert trials == "5"
    assert float(busy) > 0 and 90 < float(busy) + float(waiting) + float(starting) < 110
    assert 0 <= float(idle) < 100


@pytest.mark.parametrize("arguments", [["--jobs", "0"], ["--compile", "-1"]])
def test_what_cannot_be_is_refused(arguments, capsys):
    with pytest.raises(SystemExit) as refused:
        benchmark.main(arguments)
    assert refused.value.code == 2
    assert "--jobs and --trials at least 1" in capsys.readouterr().err
