"""`evoengine dashboard` answers what optuna-dashboard answers: only quicker, and without what
its page does not read."""

from __future__ import annotations

import json
import logging
import sqlite3
from contextlib import closing
from itertools import count
from types import SimpleNamespace

import optuna
import optuna_dashboard
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import TrialState, create_trial
from optuna_dashboard import wsgi

from evoengine.ledger import dashboard_app as module
from evoengine.ledger import dashboard_storage
from evoengine.ledger.dashboard_app import KNOWN, UNREAD, Complaints, dashboard_app
from evoengine.ledger.dashboard_script import BARS, SCRIPT, with_fewer_bars
from evoengine.ledger.dashboard_storage import DashboardStorage
from evoengine.ledger.study import artifact_store, optuna_storage

TILE = CategoricalDistribution((64, 128, 256))
MIXED = CategoricalDistribution((1, "1", False, 2.5, None))
WIDE = IntDistribution(1, 32)
ALL = {"tile": TILE, "mixed": MIXED, "stages": IntDistribution(1, 8), "rate": FloatDistribution(0.0, 1.0)}


def of(state=TrialState.COMPLETE, values=(1.0,), params=None, distributions=ALL, **more):
    params = {"tile": 128, "mixed": 2.5, "stages": 3, "rate": 0.25} if params is None else params
    return create_trial(
        state=state, values=values if state == TrialState.COMPLETE else None, params=params,
        distributions={knob: distributions[knob] for knob in params}, **more,
    )  # fmt: skip


def one_of_each(objectives):
    values = tuple(float(n + 1) for n in range(objectives))
    mixed = [{"tile": 64, "mixed": choice, "stages": 1, "rate": 0.5} for choice in MIXED.choices]
    return [
        *(of(values=values, params=params) for params in mixed),
        of(values=values, user_attrs={"outcome": "ranked", "registers": 57, "list": [1, "ä"], "long": ["x"] * 999}),
        of(values=tuple(-v for v in values), system_attrs={"fixed_params": {"tile": 64}, "constraints": [0.5]}),
        of(values=(float("inf"), *values[1:])),
        of(values=values, params={"tile": 256, "stages": 3}, distributions={"tile": TILE, "stages": WIDE}),
        of(values=values, params={}),
        of(TrialState.PRUNED, user_attrs={"reason": "spills"}, intermediate_values={0: 1.0, 1: float("nan")}),
        of(TrialState.FAIL),
        of(TrialState.RUNNING, params={"tile": 64}),
        of(TrialState.WAITING, params={}),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """Of studies of one, two and three objectives, and of one without trials: 1 to 4."""
    url = f"sqlite:///{tmp_path_factory.mktemp('studies')}/evo.db"
    storage = optuna_storage(url)
    for objectives in (1, 2, 3):
        study = optuna.create_study(storage=storage, directions=["maximize"] * objectives)
        study.add_trials(one_of_each(objectives))
        study.set_user_attr("gpu", "h100")
        optuna_dashboard.save_note(study, "what paid")
        first = study.trials[0]._trial_id
        for key, value in {"note_ver": 1, "note_str:0": "the **first**"}.items():
            storage.set_study_system_attr(study._study_id, f"dashboard:{first}:{key}", value)
    optuna.create_study(storage=storage)
    return url


@pytest.fixture(scope="module")
def quick(url):
    return dashboard_app(optuna_storage(url, DashboardStorage), artifact_store(url))


@pytest.fixture(scope="module")
def own(url):
    return wsgi(optuna_storage(url, DashboardStorage), artifact_store=artifact_store(url))


def fetch(app, path, query="", method="GET"):
    told = []
    environ = {"REQUEST_METHOD": method, "PATH_INFO": path, "QUERY_STRING": query, "wsgi.url_scheme": "http"}
    environ["HTTP_ACCEPT_ENCODING"] = "identity"
    body = b"".join(app(environ, lambda status, headers, exc_info=None: told.extend((status, dict(headers)))))
    status, headers = told
    assert headers.get("Content-Length", str(len(body))) == str(len(body))
    return status, headers["Content-Type"], body


def as_read(answer):
    for trial in answer["trials"]:
        for param in trial["params"]:
            for unread in UNREAD:
                del param[unread]
    return answer


def comparable(answer):
    """A search space's choices come in the order of a set's."""
    for space in ("union_search_space", "intersection_search_space"):
        for knob in answer[space]:
            knob["distribution"].get("choices", []).sort(key=str)
    return json.dumps(answer, sort_keys=True)  # as NaN is no NaN's equal


def test_the_installed_optuna_dashboard_is_the_one_whose_answer_is_written_here():
    assert optuna_dashboard.__version__ == KNOWN, (
        "look at what it changed, and at what its page reads, and say so there"
    )


@pytest.mark.parametrize("study", [1, 2, 3, 4])
@pytest.mark.parametrize("query", ["", "after=0", "after=3", "after=99"])
def test_a_study_is_answered_as_optuna_dashboard_does_but_for_what_its_page_does_not_read(quick, own, study, query):
    for _ in range(2):  # from the second on the dashboard builds on what it knows
        status, kind, body = fetch(quick, f"/api/studies/{study}", query)
        own_status, own_kind, own_body = fetch(own, f"/api/studies/{study}", query)
        assert (status, kind) == (own_status, own_kind) == ("200 OK", "application/json")
        answer, expected = json.loads(body), as_read(json.loads(own_body))
        assert comparable(answer) == comparable(expected)


def test_the_studies_compared_have_trials_of_every_kind(own):
    answer = json.loads(fetch(own, "/api/studies/2")[2])
    assert {t["state"] for t in answer["trials"]} == {"Complete", "Pruned", "Fail", "Running", "Waiting"}
    assert [p["param_external_pytyp"] for t in answer["trials"][:3] for p in t["params"] if p["name"] == "mixed"] == [
        "<class 'int'>", "<class 'str'>", "<class 'bool'>",
    ]  # fmt: skip
    assert len(answer["best_trials"]) >= 1 and answer["trials"][0]["note"]["body"] == "the **first**"


@pytest.mark.parametrize(
    ("path", "query", "method"),
    [
        ("/api/studies/99", "", "GET"),
        ("/api/studies/1", "after=-1", "GET"),
        ("/api/studies/1/", "after=x", "GET"),
        ("/api/studies/1/param_importances", "", "GET"),
        ("/api/studies/99/param_importances", "", "GET"),
        ("/api/studies", "", "GET"),
        ("/api/studies/1", "", "PUT"),
        ("/dashboard/studies/1", "", "GET"),
    ],
)
def test_anything_else_is_optuna_dashboards_own_answer(quick, own, caplog, path, query, method):
    caplog.set_level(logging.CRITICAL)
    assert fetch(quick, path, query, method) == fetch(own, path, query, method)


def test_trials_read_a_moment_ago_are_given_again_and_later_read_again(url, monkeypatch):
    now = count()
    monkeypatch.setattr(dashboard_storage, "time", SimpleNamespace(monotonic=lambda: next(now)))
    storage = optuna_storage(url, DashboardStorage)
    first = storage.get_all_trials(1, deepcopy=False)
    assert storage.get_all_trials(1, deepcopy=False) is first
    now = count(1 + 1 + dashboard_storage.KEPT)  # it began at 0 and took 1
    later = storage.get_all_trials(1, deepcopy=False)
    assert later is not first and len(later) == len(first)


@pytest.fixture
def written(url, monkeypatch):
    """An application, and the studies that it has written, one after the other."""
    app = dashboard_app(optuna_storage(url, DashboardStorage), artifact_store(url))
    app._ahead.submit(lambda: None).result()  # what it does at its start is done
    studies, write = [], app._written
    monkeypatch.setattr(app, "_written", lambda study, *rest: studies.append(study) or write(study, *rest))
    return app, studies


def test_a_study_is_written_before_its_page_asks_for_it_and_given_once(written):
    app, studies = written
    plain = fetch(app, "/api/studies/2")
    fetch(app, "/dashboard/studies/2/note")
    assert fetch(app, "/api/studies/2", "after=0") == plain and studies == [2, 2]
    assert fetch(app, "/api/studies/2", "after=0") == plain and studies == [2, 2, 2]
    fetch(app, "/dashboard/studies/1")
    assert fetch(app, "/api/studies/2") == plain
    app._ahead.submit(lambda: None).result()
    assert sorted(studies) == [1, 2, 2, 2, 2]


def test_what_was_written_for_a_page_that_did_not_ask_is_not_given_later(written, monkeypatch):
    app, studies = written
    fetch(app, "/dashboard/studies/2")
    app._ahead.submit(lambda: None).result()
    later = module.time.monotonic() + module.FRESH
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: later))
    fetch(app, "/api/studies/2")
    assert studies == [2, 2]


@pytest.mark.parametrize(("most", "studies"), [(100, [4]), (-1, [])])
def test_the_newest_study_is_written_at_the_start_unless_it_is_large(url, monkeypatch, most, studies):
    begun = []
    monkeypatch.setattr(module, "AT_START", most)
    monkeypatch.setattr(module._App, "_written", lambda self, study, *rest: begun.append(study))
    app = dashboard_app(optuna_storage(url, DashboardStorage), artifact_store(url))
    for _ in range(2):  # the newest is looked for, and then written
        app._ahead.submit(lambda: None).result()
    assert begun == studies


def test_the_timeline_draws_the_last_trials_alone_and_the_rest_of_the_script_is_as_it_was(quick, own):
    changed, theirs = (fetch(app, SCRIPT) for app in (quick, own))
    assert changed[:2] == theirs[:2]
    last = f"e.slice(-{BARS}).".encode()
    assert changed[2].count(last) == 1
    before, after = changed[2].split(last)
    assert before + b"e." + after == theirs[2]
    assert b'Ib="graph-timeline"' in before[-3000:]


def test_the_script_does_not_read_a_values_type(own):
    script = fetch(own, SCRIPT)[2]
    assert b"param_external_value" in script and b"param_external_pytyp" not in script


def test_a_script_that_is_not_known_is_left_as_it_is():
    assert with_fewer_bars(b"console.log(1)") == b"console.log(1)"


def test_another_version_of_optuna_dashboard_gives_its_own_answer(url, own, monkeypatch):
    monkeypatch.setattr(module.optuna_dashboard, "__version__", "0.22.0")
    newer = dashboard_app(optuna_storage(url, DashboardStorage), artifact_store(url))
    params = [p for t in json.loads(fetch(newer, "/api/studies/1")[2])["trials"] for p in t["params"]]
    assert params and all(unread in param for param in params for unread in UNREAD)


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE study_directions SET direction = 'SIDEWAYS'",
        "UPDATE trial_user_attributes SET value_json = '{broken'",
        "UPDATE trial_params SET distribution_json = '[]'",
        "UPDATE trials SET state = 'DONE'",
    ],
)
def test_a_damaged_study_is_one_line_with_a_remedy_however_often_the_page_asks(tmp_path, damage):
    url = f"sqlite:///{tmp_path}/evo.db"
    study = optuna.create_study(storage=optuna_storage(url))
    study.add_trials([of(user_attrs={"outcome": "ranked"})])
    with closing(sqlite3.connect(tmp_path / "evo.db")) as connection, connection:
        assert connection.execute(damage).rowcount
    said, logger = [], logging.getLogger("optuna_dashboard")
    complaints = Complaints(said.append, "make it again")
    logger.addHandler(complaints)
    try:
        app = dashboard_app(optuna_storage(url, DashboardStorage), artifact_store(url))
        for _ in range(2):
            status, _, body = fetch(app, "/api/studies/1")
            assert status.startswith("500") and json.loads(body) == {"reason": "internal server error"}
    finally:
        logger.removeHandler(complaints)
    (line,) = said
    assert line.startswith("a study cannot be shown: ") and line.endswith("; make it again") and "\n" not in line
