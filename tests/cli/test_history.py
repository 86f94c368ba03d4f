"""What history lists: filters by how trials ended, by family, and by an expression over their knobs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from evoengine.cli.main import evoengine
from evoengine.errors import NothingFound, UsageError
from evoengine.ledger.store import open_ledger
from evoengine.records import Outcome
from tests.support.ledger_examples import GPU, PROBLEM, a_figure, add_ranked, start_run

CONFIGS = (
    {"family": "wmma", "tile_m": 64, "stages": 2},
    {"family": "wmma", "tile_m": 128, "stages": 2},
    {"family": "mma", "tile_m": 128, "warps": 4},
    {"family": "mma", "tile_m": 32, "mixed": 8},
    {"family": "mma", "tile_m": 32, "mixed": "eight"},
)


@pytest.fixture(scope="module")
def db(tmp_path_factory) -> Path:
    """Trials 1 to 5, of which 2 is incorrect and 5 is unfinished."""
    file = tmp_path_factory.mktemp("history") / "evo.db"
    with open_ledger(str(file), create=True) as ledger:
        run = start_run(ledger)
        for n, config in enumerate(CONFIGS[:4]):
            add_ranked(ledger, run, a_figure(40.0 + n), config, f"kernel_{n}")
        ledger.finish(2, Outcome.INCORRECT, "off by 1", None, "emulator")
        ledger.add_candidate(run, PROBLEM, GPU, CONFIGS[4], (), "start")
    return file


def listed(db: Path, *arguments: str) -> list[int]:
    done = CliRunner().invoke(evoengine, ["history", "--json", "--db", str(db), *arguments], catch_exceptions=False)
    return [trial["trial"] for trial in json.loads(done.stdout)["trials"]]


@pytest.mark.parametrize(
    ("arguments", "trials"),
    [
        ([], [1, 2, 3, 4, 5]),
        (["--outcome", "incorrect"], [2]),
        (["--outcome", "unfinished", "--outcome", "incorrect"], [2, 5]),
        (["--family", "mma"], [3, 4, 5]),
        (["--family", "mma", "--family", "wmma", "--outcome", "estimated"], [1, 3, 4]),
        (["--where", "tile_m >= 64 and family == 'wmma'"], [1, 2]),
        (["--where", "stages in [2, 3]"], [1, 2]),
        (["--where", "warps * 32 == tile_m"], [3]),
        (["--where", "mixed == 'eight'", "--outcome", "unfinished"], [5]),
        (["--limit", "2"], [4, 5]),
        (["--run", "1", "--limit", "99"], [1, 2, 3, 4, 5]),
    ],
)
def test_filters_pick_trials(db, arguments, trials):
    assert listed(db, *arguments) == trials


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("__import__('os').system('true')", "calls __import__"),
        ("tile_m.__class__ == 1", "reads the attribute"),
        ("[x for x in (1,)] == 1", "holds a comprehension"),
        ("family * 10**15 == 3", "calculates with family, which is text"),
        ("mixed * 10**15 == 3", "calculates with mixed, which is text"),
        ("mixed == 'eight'", "compares mixed"),
        ("family", "is text; compare it with something"),
        ("tile_m / 0 == 1", "divides by zero"),
        ("tile_m ** tile_m ** 9 > 1", "has no value"),
        ("tile_mm > 1", "did you mean tile_m?"),
        ("tile_m >", "is not an expression"),
        ("(" * 5000 + "1" + ")" * 5000, "at most 4000 characters"),
        ("-" * 3999 + "1", "nested too deeply"),
    ],
)
def test_an_expression_that_is_wrong_or_hostile_is_refused_with_a_sentence(db, where, said):
    with pytest.raises(UsageError, match=said.replace("?", r"\?")):
        listed(db, "--where", where)


def test_where_nothing_is_picked_it_says_what_there_is(db):
    with pytest.raises(
        NothingFound, match="none of 5 trials .* outcomes estimated, incorrect, unfinished; families mma"
    ):
        listed(db, "--outcome", "hung")


def test_an_unknown_outcome_is_refused_naming_the_known_ones(db):
    done = CliRunner().invoke(evoengine, ["history", "--outcome", "good", "--db", str(db)])
    assert done.exit_code == 2 and "'incorrect'" in done.output and "'unfinished'" in done.output
