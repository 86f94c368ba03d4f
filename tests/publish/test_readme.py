"""README.md of an export: all of its provenance, and nothing from outside that Markdown or HTML would act on."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest
from markdown_it import MarkdownIt

from evoengine.publish.export import code, describe, export
from evoengine.records import (
    L2,
    Binary,
    Candidate,
    CaseResult,
    Clocks,
    Kind,
    Launch,
    LaunchMode,
    Measurement,
    Outcome,
    Policy,
    Source,
    Verdict,
)  # fmt: skip
from tests.support.kernel_gate import attention_target

TARGET = attention_target("b2,h4,s100,d64,fp16,kv2")
CASE = CaseResult("one row", "attention:b1,h1,s1,d64,fp16", 5, True, 1e-4, 1e-5, 1e-3)
FOUND = Candidate(
    trial=3, run=7, problem=str(TARGET.problem), gpu="h100", config={"family": "wmma", "tile_m": 64},
    outcome=Outcome.ESTIMATED, device="emulator",
    source=Source("// text", "attention", Launch((2, 4, 2), 128, 1024, (8, 1))),
    binary=Binary(b"\x7fELF", "sm_90a", "-arch=sm_90a", "nvrtc 13.5", 64, 0, 0, 16, (), {"HMMA": 8}, 300.0),
    verdict=Verdict("emulator", None, None, (CASE,), 100.0),
    binary_verdict=Verdict("executor", None, None, (CASE,), 100.0),
    measurement=Measurement(Kind.ESTIMATED, "model for h100", 100.0, 50.0, terms={"low_us": 40.0, "high_us": 60.0}),
)  # fmt: skip


def page(candidate, tmp_path) -> str:
    export(candidate, TARGET, tmp_path / "out")
    return (tmp_path / "out" / "README.md").read_text()


def test_a_prediction_is_said_with_as_many_digits_as_its_error_allows(tmp_path):
    terms = {"predicted": 1.0, "low_us": 20_111.0, "high_us": 30_111.0}
    text = page(replace(FOUND, measurement=Measurement(Kind.ESTIMATED, "model", 81.3, 25_432.0, terms=terms)), tmp_path)
    assert "25,000 µs, 81 TFLOPS: **estimated**" in text and "range: 20,000 to 30,000 µs" in text


def test_the_page_says_where_the_kernel_comes_from_and_how_it_is_used(tmp_path):
    text = page(FOUND, tmp_path)
    module = describe(FOUND, TARGET)["module"]
    for said in (
        f"from {module} import attention", "o = attention(q, k, v)", "trial 3 of run 7", "`h100`",
        "`NVIDIA H100 80GB HBM3`", "`sm_90a`", "132 SMs", '`{"family": "wmma"', "nvrtc 13.5",
        "50 µs, 100 TFLOPS: **estimated**",
        "predicted without a GPU", "range: 40 to 60 µs", "`emulator`: correct", "`executor`: correct",
        "`one row` on `attention:b1,h1,s1,d64,fp16`, seed 5: passed, largest error 0.0001, allowed 0.001",
        FOUND.source.sha256, "Apache License 2.0", "torch.no_grad()", "sha256sum -c SHA256SUMS",
    ):  # fmt: skip
        assert said in text, said


def test_the_checksum_of_the_page_itself_is_listed(tmp_path):
    text = page(FOUND, tmp_path)
    sums = (tmp_path / "out" / "SHA256SUMS").read_text()
    assert f"{hashlib.sha256(text.encode()).hexdigest()}  README.md\n" in sums


@pytest.mark.parametrize(
    ("figure", "said"),
    [
        (None, "There is none."),
        (Measurement(Kind.RECORDED, "A100", None, 50.0), "50 µs: **recorded**, recorded by another tuner"),
        (
            Measurement(
                Kind.MEASURED, "NVIDIA H100", 90.0, 60.0, (60.0,) * 12, 1.25,
                policy=Policy(LaunchMode.GRAPH, L2.COLD, Clocks.BOOST), normalised_us=55.0,
            ),
            "55 µs, 90 TFLOPS: **measured**",
        ),
    ],
)  # fmt: skip
def test_a_figure_is_said_with_its_kind(tmp_path, figure, said):
    text = page(replace(FOUND, measurement=figure), tmp_path)
    assert said in text
    assert "**estimated**" not in text


HOSTILE = (
    "<script>alert(1)</script>", "![x](http://elsewhere/x.png)", "[a](javascript:alert(1))", "`` ` ``", "x` <b> `y",
    "line\n# heading\n\n<img src=x>", "\x1b[31mred\x07", "a|b", "```\n<b>", "\u202egnp.exe", "", "`", "\ud800",
    "x" * 9999,
)  # fmt: skip


def test_of_a_case_that_judged_a_part_the_page_says_which(tmp_path):
    case = replace(CASE, name="full grid", part="33 of 2,048 blocks")
    text = page(replace(FOUND, binary_verdict=replace(FOUND.binary_verdict, cases=(case,))), tmp_path)
    assert "`full grid` on `attention:b1,h1,s1,d64,fp16`, `33 of 2,048 blocks`, seed 5: passed" in text


@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
def test_what_comes_from_outside_is_shown_as_text(tmp_path, text):
    case = replace(CASE, name=text, problem=text)
    hostile = replace(
        FOUND, config={"family": text, "tile_m": 64}, gpu=text,
        binary=replace(FOUND.binary, arch=text, compiler=text, options=text),
        verdict=Verdict(text, Outcome.INCORRECT, text, (case,), 1.0),
        measurement=Measurement(Kind.MEASURED, text, 1.0, 1.0, suspect=text or "word"),
    )  # fmt: skip
    written = page(hostile, tmp_path)
    assert all(c == "\n" or c.isprintable() for c in written) and len(written) < 20_000
    kinds = [token.type for token in parsed(written)]
    plain = [token.type for token in parsed(page(replace(hostile, **SAME), tmp_path / "plain"))]
    assert kinds == plain
    assert not {"html_inline", "html_block", "image", "link_open"} & set(kinds)


WORD = Measurement(Kind.MEASURED, "word", 1.0, 1.0, suspect="word")
SAME = {
    "config": {"family": "word", "tile_m": 64}, "gpu": "word",
    "binary": replace(FOUND.binary, arch="word", compiler="word", options="word"),
    "verdict": Verdict("word", Outcome.INCORRECT, "word", (replace(CASE, name="word", problem="word"),), 1.0),
    "measurement": WORD,
}  # fmt: skip


def parsed(text):
    tokens = MarkdownIt("commonmark").parse(text)
    return [found for token in tokens for found in (token, *(token.children or ()))]


@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
def test_a_value_is_one_code_span_with_all_of_its_text(text):
    (paragraph,) = [t for t in MarkdownIt("commonmark").parse(f"- x: {code(text)}, y") if t.type == "inline"]
    assert [child.type for child in paragraph.children] == ["text", "code_inline", "text"]
    shown = paragraph.children[1].content
    assert shown.isprintable() and (text == shown.strip() or not text.isprintable() or not text or len(text) > 400)
