"""What a person sees in a terminal of any width, and what a pipe is given."""

from __future__ import annotations

import re
from dataclasses import replace
from io import StringIO

import pytest
from rich.cells import cell_len
from rich.console import Console

from evoengine.cli.console import stdout
from evoengine.lineage import step
from evoengine.records import EXECUTOR, Candidate, CaseResult, Judged, KernelResources, Kind, NextKernel, Outcome
from evoengine.tuning.doctor import Finding
from evoengine.views.boards import findings_table
from evoengine.views.candidate_page import candidate_page, cases
from evoengine.views.candidate_tables import best_line, history_table, lineage, ranking
from evoengine.views.tables import Column, Table
from tests.support.ledger_examples import GPU, PROBLEM, a_binary, a_figure, a_source, a_verdict

LONG = [f"{letter}_long_knob" for letter in ("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta")]
CONFIG = {"family": "wgmma", "tile_m": 128, "tile_n": 176, "stages": 2, **dict.fromkeys(LONG, "registers")}
RANKED = Candidate(
    1234, 1, PROBLEM, GPU, CONFIG, Outcome.ESTIMATED, source=a_source(), binary=a_binary(), verdict=a_verdict(),
    measurement=a_figure(467.5), occupancy=0.25,
)  # fmt: skip
SECOND = replace(RANKED, trial=1235, config=CONFIG | {"tile_n": 96, "stages": 4, **dict.fromkeys(LONG, "shared")})
OF_ANOTHER_FAMILY = replace(
    RANKED, trial=7, config={"family": "mma", "tile_m": 64, "tile_n": 64, "stages": 2, "warps": 4}
)
REJECTED = replace(
    RANKED, outcome=Outcome.UNCOMPILABLE, measurement=None, reason="attention.cu(399): error: " + "undefined " * 40
)
FAMILIES = {1: RANKED, 2: SECOND, 3: OF_ANOTHER_FAMILY}
WIDTHS = [60, 80, 120]


@pytest.fixture
def lines():
    """What is printed of something in so many columns."""

    def printed(shown, width: int) -> list[str]:
        console = Console(width=width, file=StringIO())
        console.print(shown)
        return console.file.getvalue().splitlines()

    return printed


def head_of(shown: list[str]) -> str:
    """The names of the columns, which may stand over several lines."""
    return " ".join(shown[: next(i for i, line in enumerate(shown) if "1234" in line)])


def test_a_candidate_of_several_kernels_shows_what_the_largest_takes_and_all_spills(lines):
    launch, binary = RANKED.source.launch, replace(RANKED.binary, registers=28, spill_bytes=4, shared_bytes=0)
    behind = NextKernel("second", replace(launch, shared_bytes=100 << 10))
    source = replace(RANKED.source, launch=replace(launch, shared_bytes=1 << 10, then=(behind,)))
    several = replace(RANKED, source=source, binary=replace(binary, others=(KernelResources("second", 168, 8, 0, 0),)))
    for shown, wanted in (
        (ranking({1: several, 2: SECOND}), "168     12  100 KB"),
        (history_table([several, SECOND]), "168"),
    ):
        assert wanted in next(line for line in lines(shown, 400) if "1234" in line)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("make", [ranking, lambda found: history_table([*found.values(), REJECTED])])
def test_each_trial_is_one_line_that_fits_the_terminal(lines, width, make):
    shown = lines(make(FAMILIES), width)
    assert max(map(cell_len, shown)) <= width
    for number in ("1234", "1235"):
        [row] = [line for line in shown if number in line and "470 est." in line]
        assert "wgmma" in row
    tiles = ("tile_m", "tile_n") if make is ranking or width > 60 else ()
    assert all(name in head_of(shown) for name in ("trial", "family", *tiles, "TFLOPS"))


@pytest.mark.parametrize("width", WIDTHS)
def test_what_a_narrow_terminal_leaves_out_is_named(lines, width):
    everything = re.split(" {2,}", head_of(lines(ranking(FAMILIES), stdout.width)).strip())
    shown = lines(ranking(FAMILIES), width)
    remark = " ".join(shown).partition("hidden in this narrow terminal: ")[2].partition(" in rows")[0].split(", ")
    for name in everything:
        broken = name.replace("_", "_ ").split()[0]
        assert (name in remark) != (name in head_of(shown) or broken in head_of(shown).split()), name


def test_a_pipe_gets_every_column_by_its_whole_name_and_every_row_on_one_line(lines):
    head, *rows = lines(ranking(FAMILIES), stdout.width)
    assert {"µs", "TFLOPS", *LONG} <= set(head.split())
    assert len([row for row in rows if "470 est." in row]) == 3 and "hidden" not in " ".join(rows)


def test_a_knob_has_a_column_where_rows_differ_and_is_said_once_where_they_do_not(lines):
    one = ranking({1: RANKED, 2: replace(SECOND, config=CONFIG | {"tile_n": 96})})
    head, first, second, everywhere = lines(one, stdout.width)
    assert "tile_n" in head and "tile_m" not in head and "family" not in head
    assert "176" in first and "96" in second
    assert everywhere.startswith("in every row") and "family=wgmma tile_m=128 stages=2" in everywhere


def test_what_only_one_family_has_is_said_of_its_rows(lines):
    shown = lines(ranking({1: RANKED, 2: OF_ANOTHER_FAMILY}), stdout.width)
    assert "warps" not in shown[0]
    assert [line for line in shown if line.startswith("in rows of mma") and "warps=4" in line]
    assert [line for line in shown if line.startswith("in every row") and "stages=2" in line]


def test_values_of_unlike_types_that_print_alike_are_one_value(lines):
    a, b = replace(RANKED, config={"pad": 1}), replace(RANKED, config={"pad": True})
    assert "pad" in lines(ranking({1: a, 2: b}), stdout.width)[0]


def test_run_problem_and_gpu_are_columns_where_they_differ_and_else_said_once(lines):
    same, *_ = lines(history_table([RANKED, SECOND]), 120)
    assert same == f"run 1 · problem {PROBLEM} · GPU {GPU}"
    once, head, *rows = lines(history_table([RANKED, replace(SECOND, run=2, gpu="a100")]), stdout.width)
    assert once == f"problem {PROBLEM}" and head.split()[:3] == ["trial", "run", "GPU"]
    assert [row.split()[1:3] for row in rows[:2]] == [["1", "h100"], ["2", "a100"]]


def test_a_measured_figure_has_its_share_of_the_peak_and_its_ratio_to_the_baseline(lines):
    figure = replace(
        a_figure(495.0, Kind.MEASURED), vs_baseline=1.25, terms={"peak_tflops_percent": 50.0, "peak_gbs_percent": 3.0}
    )
    head, row, *_ = lines(ranking({1: replace(RANKED, measurement=figure)}), stdout.width)
    assert "% of peak" in head and "vs baseline" in head
    assert "495.0  " in row and "50%" in row and "1.25×" in row and "est." not in row


def test_of_a_prediction_the_share_of_the_peak_is_the_rooflines_time_over_its_own(lines):
    figure = a_figure(467.5)
    head, row, *_ = lines(ranking({1: RANKED}), stdout.width)
    assert f"{100 * figure.terms['roofline_us'] / figure.compared_us:.0f}%" in row and "% of peak" in head


def test_without_operations_the_time_bears_the_mark_of_its_kind(lines):
    figure = replace(a_figure(467.5, Kind.RECORDED), tflops=None, median_us=12.5)
    head, row, *_ = lines(ranking({1: replace(RANKED, measurement=figure)}), 80)
    assert "12.50 rec." in row and "TFLOPS" not in head


def test_a_predicted_time_bears_the_mark_as_its_rate_does(lines):
    shown = lines(ranking({1: RANKED}), 120)
    assert re.search(r"\d est\. +470 est\.", next(line for line in shown if "1234" in line))


def test_the_largest_error_is_shown_as_a_share_of_what_is_allowed(lines):
    largest = replace(RANKED.verdict.cases[0], max_error=5e-4)  # of the 1e-3 that is allowed
    verdict = replace(RANKED.verdict, cases=(*RANKED.verdict.cases, largest))
    head, row, *_ = lines(ranking({1: replace(RANKED, verdict=verdict)}), 120)
    assert head.endswith("err ÷ allowed") and row.endswith(" 0.5")
    assert "max err" not in head


def test_the_best_so_far_shows_its_figure_before_a_terminal_ends():
    assert "470 TFLOPS est." in best_line(RANKED)[:60]


@pytest.mark.parametrize("width", WIDTHS)
def test_a_reason_ends_where_the_terminal_does_and_is_whole_on_the_trials_page(lines, width):
    [row] = [line for line in lines(history_table([REJECTED]), width) if "1234" in line]
    assert "attention.cu(399)" in row and row.endswith("…")
    page = " ".join(" ".join(lines(candidate_page(REJECTED), width)).split())
    assert REJECTED.reason.strip() in page


def test_a_reason_in_a_pipe_is_one_line_however_long(lines):
    assert any(REJECTED.reason.strip() in line for line in lines(history_table([REJECTED]), stdout.width))


@pytest.mark.parametrize("width", WIDTHS)
def test_pages_and_lineages_fit_the_terminal_too(lines, width):
    made = step(replace(SECOND, parents=(1234,)), {1234: RANKED})
    for shown in (candidate_page(RANKED), lineage([made]), cases(a_verdict(Outcome.INCORRECT))):
        assert max(map(cell_len, lines(shown, width))) <= width


def test_what_was_judged_of_a_large_problem_is_said(lines):
    case = CaseResult("full grid", "demo:rows=9", 1, True, 1e-4, 1e-5, 1e-3, part="33 of 2,048 blocks")
    verdict = replace(a_verdict(), device=EXECUTOR, cases=(case,))
    assert any("ok: 33 of 2,048 blocks" in line for line in lines(cases(verdict), 120))
    assert str(Judged((verdict,))).endswith("on 1 cases; judged in part: full grid (33 of 2,048 blocks)")


def test_wide_characters_keep_columns_in_line(lines):
    shown = lines(Table([Column("knob"), Column("n", right=True)], [["日本語", "1"], ["ab", "22"]]), 40)
    assert [cell_len(line) for line in shown] == [10, 10, 10]


def test_a_column_without_anything_is_left_out_and_a_row_of_the_wrong_length_is_refused(lines):
    assert lines(Table([Column("a"), Column("b")], [["", "x"]]), 40) == ["b", "x"]
    with pytest.raises(ValueError, match="zip"):
        Table([Column("a")], [["x", "y"]])


def test_the_doctor_cuts_no_path_short(lines):
    path = "/opt/" + "folder/" * 12 + "include"
    shown = lines(findings_table([Finding("CUDA compiler", True, f"nvrtc, headers in {path}")]), 80)
    assert path in "".join(line.strip() for line in shown)
