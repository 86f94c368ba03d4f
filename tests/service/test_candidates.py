"""Texts proposed over HTTP: judged in a jail, kept with their parent, and refused without one, a token or room."""

from __future__ import annotations

import re
import shutil

import pytest

import evoengine
from evoengine.ledger.store import open_ledger
from evoengine.sandbox import jail
from evoengine.service import api

needs_jail = pytest.mark.skipif(jail.why_no_jail() is not None, reason=str(jail.why_no_jail()))
PROBLEM = "rms_norm:rows9,hidden64,fp16"


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    """A ledger with a correct kernel, and its trial."""
    place = tmp_path_factory.mktemp("candidates") / "c.db"
    best = evoengine.tune(PROBLEM, gpu="h100", trials=1, db=place, device="emulator").best[0]
    return place, best.trial


@pytest.fixture
def ledger(searched, tmp_path):
    shutil.copy(searched[0], tmp_path / "c.db")
    with open_ledger(str(tmp_path / "c.db"), create=False) as opened:
        yield opened


@needs_jail
def test_a_text_is_judged_and_kept_with_its_parent(served, searched, ledger):
    parent, client = ledger.candidate(searched[1]), served().client
    right = parent.source.text + "\n// the same\n"
    found = client.propose(parent.trial, right)
    assert (found["outcome"], found["parents"], found["text"]) == ("estimated", [parent.trial], right)
    assert found["predicted_us"] == pytest.approx(parent.measurement.compared_us)
    kept = ledger.candidate(found["trial"])
    assert ledger.runs()[-1].status == "all proposals judged"
    assert kept.source.launch == parent.source.launch and kept.operator == "proposal"

    wrong = client.propose(parent.trial, right.replace("rsqrtf", "sqrtf"))
    assert wrong["outcome"] == "incorrect" and wrong["counterexample"]["max_error"] > 0
    seeds = {case.seed for verdict in ledger.verdicts(wrong["trial"]) for case in verdict.cases}
    assert seeds and not any(str(seed) in str(wrong) for seed in seeds)


@needs_jail
def test_what_cannot_be_judged_is_a_sentence(served, searched, ledger):
    before, http = (ledger.count(), len(ledger.runs())), served().http
    for body, status, sentence in (
        ({"parent": 99, "text": "x"}, 422, "there is no trial 99"),
        ({"parent": searched[1], "text": ""}, 422, "text"),
        ({"parent": searched[1], "text": "x" * (1 << 20 | 1)}, 413, "body"),
        ({"parent": searched[1], "text": "x", "grid": [1, 1, 1]}, 422, "'grid' is not a field"),
        ({"parent": searched[1], "text": "a\u0000b"}, 422, "U\\+0000"),
    ):
        answer = http.post("/v1/candidates", json=body)
        assert answer.status_code == status
        assert re.search(sentence, answer.json()["detail"]), answer.json()
    assert (ledger.count(), len(ledger.runs())) == before


def test_a_server_without_a_jail_takes_none(served, searched, monkeypatch):
    monkeypatch.setattr(api, "why_no_jail", lambda: "bwrap cannot be started: install bubblewrap")
    answer = served().http.post("/v1/candidates", json={"parent": searched[1], "text": "x"})
    assert answer.status_code == 501 and "install bubblewrap" in answer.json()["detail"]
