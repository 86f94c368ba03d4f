"""The status page and the report behind it in a real browser: nothing is refused, nothing is cut off on a phone."""

from __future__ import annotations

import re
from html import escape

import pytest

from evoengine.records import Kind
from evoengine.service.page import FOLDER
from evoengine.service.tables import JobRow
from tests.support.browser import Browser, needs_browser, opened
from tests.support.ledger_examples import GPU, PROBLEM, a_figure, add_ranked, start_run

WIDTHS = (390, 1280)
LONG = "no_place_to_break_" * 20
MEASURE = """
addEventListener("load", () => {
  const widths = [...document.querySelectorAll("iframe")].map(
    frame => [frame.width, frame.contentDocument.documentElement.scrollWidth].join(":"));
  document.title = widths.join(" ");
});
"""


def at_work(served, ledger, text=LONG):
    """A server with a kernel and a job, both of long names."""
    parts = served()
    add_ranked(ledger, start_run(ledger), a_figure(42.0, Kind.MEASURED))
    parts.http.post("/v1/jobs", json={"problems": ["gemm:m64,n64,k64,fp16"], "gpu": GPU})
    parts.executors.beat(())
    with ledger.database.writing() as session:
        job = session.get_one(JobRow, 1)
        job.why, job.parts = text, [{**job.parts[0], "problem": text, "ended": text}]
    return parts


def in_frames(page: str) -> str:
    """The page beside itself at each width, with its style written into it: a page there may not be framed."""
    style = FOLDER.joinpath("style.css").read_text()
    alone = re.sub(r'<link rel="stylesheet"[^>]*>', f"<style>{style}</style>", page).replace('http-equiv="refresh"', "")
    return "".join(f'<iframe width="{w}" height="900" srcdoc="{escape(alone)}"></iframe>' for w in WIDTHS)


def measured(pages: list[str], folder) -> list[tuple[int, int]]:
    """Width of each frame, and of what is in it."""
    frames = "".join(map(in_frames, pages))
    (folder / "frames.html").write_text(f"<!doctype html><title>none</title><script>{MEASURE}</script>{frames}")
    seen, _ = opened((folder / "frames.html").as_uri(), folder / "profile", 2)
    [title] = re.findall("<title>([^<]*)</title>", seen.partition("<iframe")[0])
    return [tuple(map(int, pair.split(":"))) for pair in title.split()]


@needs_browser
def test_the_status_page_fits_a_phone_and_a_desk(served, ledger, tmp_path):
    parts = at_work(served, ledger)
    paths = ("/", "/jobs/1", "/new", "/docs")
    found = measured([parts.http.get(path).text for path in paths], tmp_path)
    assert [width for width, _ in found] == [*WIDTHS] * len(paths)
    of_each = [path for path in paths for _ in WIDTHS]
    too_wide = [(path, width) for path, (width, needed) in zip(of_each, found, strict=True) if needed > width]
    assert too_wide == []


@needs_browser
def test_a_page_that_is_too_wide_is_seen(tmp_path):
    wide = '<!doctype html><body><p style="width: 2000px">wide</p></body>'
    assert all(needed > width for width, needed in measured([wide], tmp_path))


@needs_browser
@pytest.mark.exhaustive  # test_report_page.py shows the report, and the test above how the pages look
def test_the_status_page_and_its_report_are_shown_without_a_complaint(served, ledger, tmp_path):
    parts = at_work(served, ledger)
    seen, console = opened(parts.url, tmp_path / "profile", 2)
    assert console == []
    assert "1 queued" in seen and "42.00 TFLOPS" in seen
    [link] = re.findall(r'href="(/report[^"]*)"', seen)
    assert link == f"/report?gpu={GPU}&amp;problem={PROBLEM.replace(':', '%3A').replace(',', '%2C')}"
    report, console = opened(parts.url + link.replace("&amp;", "&"), tmp_path / "profile", 20)
    assert console == []
    assert re.search(r'data-drawn="\d+"', report) and f"{PROBLEM} on {GPU}" in report


@pytest.fixture
def browser(tmp_path):
    browser = Browser(tmp_path / "profile")
    yield browser
    browser.close()


@needs_browser
def test_a_job_is_submitted_and_cancelled_by_hand(served, ledger, browser):
    """What a browser says of where a form comes from is its own; the server takes it."""
    parts = served()
    parts.executors.beat(())
    browser.open(parts.url)
    browser.click('a[href="/new"]')
    browser.fill("problems", "gemm:m64,n64,k64,fp16\nrms_norm:rows64,hidden256,bf16")
    browser.fill("trials", "7")
    browser.fill("gpu", "h1000")
    browser.click("form.fields button")
    assert "did you mean h100" in browser.text
    assert "rms_norm:rows64,hidden256,bf16" in browser.run("document.querySelector('[name=problems]').value")
    browser.fill("gpu", "h100")
    browser.click("form.fields button")
    assert browser.run("location.pathname") == "/jobs/1" and "rms_norm:rows64,hidden256,bf16" in browser.text
    assert parts.jobs.find(1).request["trials"] == 7
    browser.click('form[action="/jobs/1/cancel"] button')
    assert browser.run("location.pathname") == "/jobs/1" and parts.jobs.find(1).state == "cancelled"
    assert browser.run("document.querySelector('form[action=\"/jobs/1/cancel\"]')") is None
