"""Searches on a cluster, as a user calls them; of what cannot be meant or reached, one sentence."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections import Counter

import pytest
from click.testing import CliRunner

from evoengine import __version__
from evoengine.cli.main import evoengine as command
from evoengine.errors import MachineError, NothingFound, UsageError
from evoengine.ledger.store import open_ledger
from evoengine.tuning import ray_cluster
from evoengine.tuning.ray_cluster import Node, connected, gpus_of, require_fit
from evoengine.tuning.search import SearchOptions
from tests.support.waiting import wait_for

PROBLEM = "rms_norm:rows64,hidden256,bf16"


@pytest.fixture
def nothing_listens() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def failed(*arguments: str) -> Exception:
    done = CliRunner().invoke(command, arguments)
    assert done.exception is not None
    return done.exception


@pytest.mark.parametrize("address", ["here", "ray://", "http://head:10001", "head:0", "head:70000", "ray://head"])
def test_what_is_no_cluster_is_told_how_one_is_written(address):
    error = failed("cluster", "status", "--cluster", address)
    assert isinstance(error, UsageError) and f"{address!r} is not the address of a cluster: write local" in str(error)


@pytest.mark.parametrize("scheme", ["ray://", ""])
def test_a_cluster_that_cannot_be_reached_is_one_sentence(nothing_listens, scheme):
    address = f"{scheme}127.0.0.1:{nothing_listens}"
    error = failed("cluster", "status", "--cluster", address)
    assert isinstance(error, MachineError) and error.exit_code == 3
    assert str(error) == f"the Ray cluster at {address} cannot be reached: Connection refused"


def test_a_password_on_the_command_line_never_gets_to_ray_which_keeps_command_lines(monkeypatch, nothing_listens):
    monkeypatch.setattr(sys, "argv", ["evoengine", "search", "--db", "postgresql://me:secret@host/db"])
    with pytest.raises(UsageError, match="set EVOENGINE_DB instead") as refused, connected("auto"):
        pass
    assert "secret" not in str(refused.value)


def test_without_ray_the_remedy_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MachineError, match=r"pip install 'evoengine\[ray\]'"), connected("local"):
        pass


def test_several_gpus_need_a_cluster(monkeypatch):
    error = failed("search", "--gpu", "h100", "--gpu", "a100")
    assert isinstance(error, UsageError)
    assert str(error) == "--gpu is given 2 times (h100 and a100); without --cluster it takes one value"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"timeout": 5.0}, "requires --cluster"),
        ({"cluster": "local", "device": "recorded:x.json"}, "--cluster contradicts --device"),
    ],
    ids=str,
)
def test_options_that_do_not_go_together_are_refused(given, said):
    with pytest.raises(UsageError, match=said):
        SearchOptions(**given)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--cluster", "local"], "--detach requires --cluster with a cluster that outlives this command"),
        ([], "--detach requires --cluster"),
        (["--cluster", "auto", "--db", "own.db"], "--detach contradicts --db"),
    ],
    ids=["local", "nowhere", "a ledger here"],
)
def test_a_detached_search_needs_a_cluster_and_a_ledger_that_outlive_the_command(arguments, said):
    error = failed("search", "--detach", *arguments)
    assert isinstance(error, UsageError) and said in str(error)


@pytest.mark.parametrize(
    ("node", "said"),
    [
        (dict(why_unfit=f"evoengine 0.0.9 (here {__version__})"), rf"0.0.9 \(here {__version__}\)"),
        (dict(cpus=0), "no node with CPUs"),
    ],
    ids=["another version", "no CPUs"],
)
def test_nodes_that_cannot_run_a_search_are_named(node, said):
    with pytest.raises(MachineError, match=said):
        require_fit([Node("id", "host", "10.0.0.1", **{"cpus": 4, **node})])


def look(**changed):
    own = {"python": sys.version.split()[0], "evoengine": __version__, "compiler": ray_cluster._own_compiler()}
    return ray_cluster._described(Node("id", "host", "10.0.0.1", 4), own | changed).why_unfit


def test_another_python_evoengine_or_compiler_of_a_node_is_said_with_both_versions():
    assert look() is None
    own = ".".join(map(str, sys.version_info[:3]))
    assert look(python="3.9.1") == f"Python 3.9.1 (here {own})"
    assert look(evoengine="9.9") == f"evoengine 9.9 (here {__version__})"
    assert look(evoengine=None, why="No module named 'evoengine'").startswith("no evoengine: No module")
    assert look(compiler="nvrtc 9.0").startswith("nvrtc 9.0 (here ")


def test_the_function_that_asks_a_node_runs_where_there_is_no_evoengine(tmp_path):
    pickle = pytest.importorskip("ray.cloudpickle", reason="needs Ray")
    code = pickle.dumps(ray_cluster._node_inspection())
    program = "import pickle, sys; sys.modules['evoengine'] = None; print(pickle.load(open(sys.argv[1], 'rb'))())"
    (tmp_path / "look").write_bytes(code)
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "look"], capture_output=True, text=True, cwd=tmp_path,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
    )  # fmt: skip
    assert "'evoengine': None" in done.stdout and "'why'" in done.stdout, done.stderr


def test_gpus_count_by_kind_where_ray_hands_them_out():
    assert gpus_of({"CPU": 8, "GPU": 3, "gpu:h100": 2, "gpu:a100": 1}) == {"h100": 2, "a100": 1}
    assert gpus_of({"CPU": 8, "gpu:h100": 2}) == {}


# ── on real clusters ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    """A cluster of two nodes, whose ledger stands in their environment."""
    pytest.importorskip("ray", reason="needs Ray: pip install 'evoengine[ray]'")
    from tests.support.fleet import nodes

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EVOENGINE_DB", str(tmp_path_factory.mktemp("fleet") / "evo.db"))
        with nodes(1, 1) as (cluster, _):
            yield cluster


def search(fleet, *arguments, db, cluster=None):
    said = ["--problem", PROBLEM, "--db", str(db), "--cluster", cluster or fleet.address, *arguments]
    return subprocess.Popen(
        [sys.executable, "-m", "evoengine", "search", *said], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def outcomes(db):
    try:
        with open_ledger(str(db), create=False) as ledger:
            return ledger.candidates()
    except NothingFound:  # it has not begun
        return []


@pytest.mark.exhaustive
def test_two_kinds_of_gpu_are_searched_at_once_into_one_ledger(fleet, tmp_path):
    done = search(fleet, "--gpu", "h100", "--gpu", "a100", "--trials", "2", "--json", db=tmp_path / "evo.db")
    out, err = done.communicate()
    assert done.returncode == 0, err
    searches = json.loads(out)["searches"]
    assert list(searches) == ["h100", "a100"] and {s["run"] for s in searches.values()} == {1, 2}
    with open_ledger(str(tmp_path / "evo.db"), create=False) as ledger:
        assert {(r.gpu, r.status) for r in ledger.runs()} == {("h100", "all trials done"), ("a100", "all trials done")}


@pytest.mark.exhaustive
def test_a_driver_that_is_killed_leaves_no_actor_and_its_search_is_taken_up_again(fleet, tmp_path):
    db = tmp_path / "evo.db"
    first = search(fleet, "--trials", "30", db=db)
    wait_for(lambda: db.exists() and any(c.outcome for c in outcomes(db)))
    first.send_signal(signal.SIGKILL)
    first.communicate()
    before = {c.trial: c.outcome for c in outcomes(db) if c.outcome}
    second = search(fleet, "--trials", "3", db=db)
    _, err = second.communicate()
    assert second.returncode == 0, err
    found = outcomes(db)
    assert {c.trial: c.outcome for c in found if c.trial in before} == before
    assert max(Counter(c.trial for c in found).values()) == 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("begun", [False, True], ids=["as it begins", "with candidates in flight"])
def test_a_search_whose_raylet_dies_ends_with_a_sentence_that_names_it(tmp_path, begun):
    pytest.importorskip("ray", reason="needs Ray: pip install 'evoengine[ray]'")
    from tests.support.fleet import nodes

    db = tmp_path / "evo.db"
    with nodes(1) as (cluster, _):
        asked = search(cluster, "--trials", "30", db=db)
        assert asked.stderr is not None
        said = next(line for line in asked.stderr if "1 node with" in line)
        if begun:
            wait_for(lambda: db.exists() and any(c.outcome for c in outcomes(db)))
        cluster.kill_raylets()
        _, err = asked.communicate()
    assert asked.returncode == 3, said + err
    assert err.count(f"evoengine: {ray_cluster.RAYLET_DIED}") == 1 and "Traceback" not in err


@pytest.mark.exhaustive
def test_a_gpu_that_no_node_has_is_waited_for_as_long_as_was_said(fleet, tmp_path):
    asked = search(fleet, "--gpu", "h200", "--device", "cuda", "--timeout", "8", db=tmp_path / "evo.db")
    _, err = asked.communicate()
    assert asked.returncode == 3
    assert "no node of the cluster has a GPU of kind h200" in err and "waiting (--timeout 8)" in err
    assert "Traceback" not in err and not (tmp_path / "evo.db").exists()


@pytest.mark.exhaustive
def test_a_detached_search_outlives_its_command_and_its_own_process(fleet):
    begun = subprocess.run(
        [sys.executable, "-m", "evoengine", "search", "--problem", PROBLEM, "--trials", "6", "--detach", "--cluster",
         fleet.address], capture_output=True, text=True,
    )  # fmt: skip
    assert begun.returncode == 0, begun.stderr
    assert "continues on the cluster" in begun.stderr
    db = os.environ["EVOENGINE_DB"]
    wait_for(lambda: os.path.exists(db) and any(c.outcome for c in outcomes(db)))
    coordinator = process_of("ray::DetachedSearch")
    os.kill(coordinator, signal.SIGKILL)
    wait_for(lambda: process_of("ray::DetachedSearch") not in (None, coordinator))
    wait_for(lambda: process_of("ray::DetachedSearch") is None)
    with open_ledger(db, create=False) as ledger:
        assert [r.status for r in ledger.runs()][-1] == "all trials done"
        assert "secret" not in str(ledger.runs())


def process_of(name: str) -> int | None:
    listed = subprocess.run(["ps", "-eo", "pid=,args="], capture_output=True, text=True).stdout.splitlines()
    return next((int(line.split()[0]) for line in listed if line.split()[1:2] == [name]), None)
