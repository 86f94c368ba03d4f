"""What a search says at its end where nothing tells how fast its correct candidates are."""

from __future__ import annotations

from collections import Counter

from evoengine.cli.progress import print_summary
from evoengine.records import Outcome
from evoengine.search.evaluators import NO_COST, end_of
from evoengine.search.progress import Progress
from evoengine.stages.tasks import Evaluation
from evoengine.tuning.search import SearchResult
from tests.support.ledger_examples import a_verdict

UNREAD = "the model cannot read the binary: unknown opcodes: XYZZY"


def test_what_neither_model_nor_formula_can_tell_is_unranked_with_both_reasons():
    end = end_of(Evaluation((a_verdict(),), None, UNREAD))
    assert (end.outcome, end.device) == (Outcome.UNRANKED, "emulator")
    assert NO_COST in end.reason and UNREAD in end.reason


def test_correct_candidates_without_figures_are_counted_and_the_search_is_no_failure(capsys):
    progress = Progress(2, outcomes=Counter({Outcome.UNRANKED: 2}))
    result = SearchResult(1, progress, (), invalid_proposals=0, repeated_proposals=0, missed={})
    assert print_summary(result, False, None, []) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "2 correct candidates cannot be ranked: the model cannot read their binaries" in said
    assert "evoengine measure on a machine with the GPU" in said
