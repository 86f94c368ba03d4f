"""The benchmark of how busy a GPU is kept: the search is real, and idle time is counted where there is some."""

from __future__ import annotations

import pytest

from benchmarks import overlap as benchmark


def test_idle_is_what_no_candidate_was_on_the_gpu_between_the_first_and_the_last(tmp_path):
    log = tmp_path / "log"
    log.write_text("10.0 11.0\n11.5 12.5\n12.5 14.0\n")
    assert benchmark.idle_share(log) == pytest.approx(0.5 / 4)


@pytest.mark.exhaustive
def test_searches_run_to_their_end_with_and_without_faults_and_account_for_their_time(capsys):
    assert benchmark.main(["--compile", "0", "--gpu", "0.1", "--jobs", "1", "--trials", "8", "--faults", "0.8"]) == 0
    rows = [line.strip("│").split("│") for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    plain, faulty = ([cell.strip("% ") for cell in row] for row in rows)
    assert (plain[:2], plain[3]) == (["0", "8 of 8"], "1.00")
    assert faulty[0] == "80" and int(faulty[1].split(" of ")[0]) < 8
    for *_, busy, waiting, starting, idle in (plain, faulty):
        assert float(busy) > 0 and 90 < float(busy) + float(waiting) + float(starting) < 110
        assert 0 <= float(idle) < 100


@pytest.mark.parametrize("arguments", [["--jobs", "0"], ["--compile", "-1"], ["--faults", "1"]])
def test_what_cannot_be_is_refused(arguments, capsys):
    with pytest.raises(SystemExit) as refused:
        benchmark.main(arguments)
    assert refused.value.code == 2
    assert "--jobs and --trials at least 1" in capsys.readouterr().err
