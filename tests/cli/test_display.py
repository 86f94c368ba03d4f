"""What a person sees in a terminal of any width, and what a pipe is given."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from evoengine.cli.display import best_line, history_table, ranking, stdout
from evoengine.cli.doctor import Finding, doctor_table
from evoengine.records import Candidate, Outcome
from tests.support.ledger_examples import GPU, PROBLEM, a_binary, a_figure, a_source, a_verdict

CONFIG = {"family": "wgmma"} | {f"knob_{i}": "registers" for i in range(7)}
RANKED = Candidate(
    1234, 1, PROBLEM, GPU, CONFIG, Outcome.ESTIMATED, source=a_source(), binary=a_binary(), verdict=a_verdict(),
    measurement=a_figure(467.5), occupancy=0.25,
)  # fmt: skip
REJECTED = replace(RANKED, outcome=Outcome.UNCOMPILABLE, reason="attention.cu(399): error: " + "undefined " * 40)


@pytest.fixture
def lines():
    """What is printed of something in so many columns."""

    def printed(shown, width: int) -> list[str]:
        console = Console(width=width, file=StringIO())
        console.print(shown)
        return console.file.getvalue().splitlines()

    return printed


@pytest.mark.parametrize("width", [80, 120])
def test_where_a_terminal_is_narrow_configurations_go_on_below_and_all_else_stays_whole(lines, width):
    for shown in (ranking({1: RANKED}), history_table([RANKED])):
        head, row, *below = lines(shown, width)
        assert "trial" in head and "family" in head and "TFLOPS" in head
        assert "1234" in row and "wgmma" in row and "467.5 est." in row
        assert "".join((row, *below)).count("/") >= 6 and "…" not in "".join((row, *below))


def test_the_best_so_far_shows_its_figure_before_a_terminal_ends():
    assert "467.5 est. TFLOPS" in best_line(RANKED)[:60]


def test_a_reason_in_a_pipe_is_one_line_however_long(lines):
    assert any(REJECTED.reason.strip() in line for line in lines(history_table([REJECTED]), stdout.width))


def test_the_doctor_cuts_no_path_short(lines):
    path = "/opt/" + "folder/" * 12 + "include"
    shown = lines(doctor_table([Finding("CUDA compiler", True, f"nvrtc, headers in {path}")]), 80)
    assert path in "".join(line.strip() for line in shown)
