"""What a search says at its end where nothing tells how fast its correct candidates are."""

from __future__ import annotations

from collections import Counter

from evoengine.cli.conclusion import print_summary
from evoengine.ledger.store import open_ledger
from evoengine.records import Outcome
from evoengine.search.coordinator import Progress
from evoengine.search.evaluators import NO_COST, record_evaluation
from evoengine.stages.tasks import Evaluation
from evoengine.tuning.search import SearchResult
from tests.support.ledger_examples import CONFIG, GPU, PROBLEM, a_verdict, start_run

UNREAD = "the model cannot read the binary: unknown opcodes: XYZZY"


def test_what_neither_model_nor_formula_can_tell_is_unranked_with_both_reasons(tmp_path):
    with open_ledger(str(tmp_path / "evo.db"), create=True) as ledger:
        trial = ledger.add_candidate(start_run(ledger), PROBLEM, GPU, CONFIG, (), "start")
        outcome, reason, device = record_evaluation(ledger, trial, Evaluation(a_verdict(), None, UNREAD))
    assert (outcome, device) == (Outcome.UNRANKED, "emulator")
    assert NO_COST in reason and UNREAD in reason


def test_correct_candidates_without_figures_are_counted_and_the_search_is_no_failure(capsys):
    progress = Progress(2, outcomes=Counter({Outcome.UNRANKED: 2}))
    result = SearchResult(1, progress, (), invalid_proposals=0, repeated_proposals=0, missed={})
    assert print_summary(result, False, None, []) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "2 correct candidates and no figure to rank them by: the model cannot read their binaries" in said
    assert "evoengine measure on a machine with the GPU" in said
