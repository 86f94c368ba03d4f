"""The door itself: help, versions, laziness, doctor, interruption."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from evoengine.cli.main import COMMANDS
from evoengine.errors import NothingFound
from evoengine.ledger.store import open_ledger
from evoengine.records import Candidate, Outcome
from tests.cli.conftest import SMALL
from tests.support.exhaustive import more
from tests.support.libraries_path import FOLDER
from tests.support.waiting import wait_for

HELPS = """
import sys
from click.testing import CliRunner
from evoengine.cli.main import COMMANDS, evoengine
for name in ["", *COMMANDS]:
    assert CliRunner().invoke(evoengine, [*name.split(), "--help"]).exit_code == 0
    heavy = {"torch", "cupy", "optuna", "sqlalchemy", "alembic", "rich", "jinja2", "numpy", "pebble"} & set(sys.modules)
    assert not heavy, (name, heavy)
"""


def test_help_names_every_command(evoengine):
    done = evoengine("--help")
    assert done.returncode == 0
    assert all(f"  {name} " in done.stdout for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself_and_its_options_or_the_commands_below_it(evoengine, name):
    done = evoengine(name, "--help")
    assert done.returncode == 0
    assert COMMANDS[name].split(",")[0].split(" of ")[0][:20] in done.stdout
    words = {line.split()[0] for line in done.stdout.splitlines() if line.strip()}
    assert "Commands:" in words or any(word.startswith("--") for word in words)


def test_no_help_imports_anything_heavy_so_that_it_is_instant():
    done = subprocess.run([sys.executable, "-c", HELPS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_version_is_the_packages(evoengine):
    from evoengine import __version__

    assert evoengine("--version").stdout.strip().endswith(__version__)


def test_an_unknown_command_is_exit_2(evoengine):
    done = evoengine("serach")
    assert done.returncode == 2
    assert "serach" in done.stderr


def test_doctor_says_what_is_here(evoengine):
    done = evoengine("doctor", "--json")
    found = json.loads(done.stdout)
    assert done.returncode == (0 if found["able"] else 3)
    assert [f["name"] for f in found["findings"]] == [
        "Python", "CUDA compiler", "disassembler", "C++ compiler", "torch", "GPU", "CUDA versions", "baselines",
    ]  # fmt: skip
    assert all(f["remedy"] for f in found["findings"] if not f["here"])


def test_doctor_names_the_packages_whose_kernels_are_baselines(evoengine):
    def shown(**environment):
        return next(line for line in evoengine("doctor", env=environment).stdout.splitlines() if "baselines" in line)

    assert shown().endswith("kernels of torch")
    here = shown(PYTHONPATH=str(FOLDER))
    assert here.endswith("kernels of torch, flash_attn 2.8.4, flash_attn_interface 3.0.0, flashinfer 0.7.2.post1")


def test_doctor_names_the_remedy_for_a_missing_compiler(evoengine, tmp_path):
    done = evoengine("doctor", env={"PATH": str(tmp_path), "CXX": ""})
    assert done.returncode == 3
    assert "apt install g++" in done.stdout


@pytest.mark.parametrize("arguments", ["problems", "problems --json", *more(["doctor", "doctor --json"])])
def test_a_reader_that_goes_away_is_no_failure(arguments):
    command = f"set -o pipefail; {sys.executable} -m evoengine {arguments} | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.returncode == 0 and "rror" not in done.stderr


SEARCH = ("search", "--problem", SMALL, "--device", "emulator", "--family", "scalar")


@pytest.fixture
def under_way(tmp_path):
    """A search that has finished two trials: its ledger, and its process, which leads a session of its own."""
    db = tmp_path / "evo.db"
    command = [
        sys.executable,
        "-m",
        "evoengine",
        *SEARCH,
        "--trials",
        "500",
        "--seed",
        "4",
        "--jobs",
        "1",
        "--db",
        str(db),
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            wait_for(lambda: count_ended(db) >= 2 or process.poll() is not None)
            assert process.poll() is None, process.stderr.read()
            yield db, process
        finally:
            process.kill()


def test_ctrl_c_stops_a_search_with_what_there_is_and_the_same_run_goes_on(evoengine, under_way):
    db, process = under_way
    os.killpg(process.pid, signal.SIGINT)  # a terminal sends it to the whole group
    out, err = process.communicate(timeout=300)
    assert process.returncode == 130, err
    assert "interrupted" in err and "Traceback" not in err
    assert "TFLOPS" in out
    before = candidates(db)
    left = {trial for trial, c in before.items() if c.outcome is Outcome.INTERRUPTED}
    wanted = len(before) + 1  # of which those that are left are tried again
    evoengine(*SEARCH, "--resume", "--trials", wanted, "--jobs", 1, "--db", db)
    after = candidates(db)
    assert left <= {c.retry_of for c in after.values()}
    assert {c.run for c in after.values()} == {1}
    judged = [c for c in after.values() if c.outcome.judged and c.outcome is not Outcome.DUPLICATE]
    assert len(judged) == wanted


PRESSED_TWICE = """
import os, signal
from evoengine.cli.main import main
from evoengine.sandbox import workers

work, stop = workers._Worker.call, workers.ProcessPool.stop

def interrupted_under_way(self, *task):
    os.kill(os.getpid(), signal.SIGINT)
    return work(self, *task)

def stopped_half_way(self):
    stop(self)
    os.kill(os.getpid(), signal.SIGINT)

workers._Worker.call, workers.ProcessPool.stop = interrupted_under_way, stopped_half_way
main()
"""


def test_a_second_ctrl_c_while_the_workers_are_being_stopped_ends_at_once(tmp_path):
    arguments = (*SEARCH, "--trials", "4", "--jobs", "1", "--db", str(tmp_path / "evo.db"))
    command = [sys.executable, "-c", PRESSED_TWICE, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, "Traceback" in done.stderr) == (130, False), done.stderr


def test_a_killed_search_loses_nothing_and_leaves_no_process(under_way):
    db, process = under_way
    seen = ended(db)
    process.kill()
    process.wait()
    before = ended(db)
    assert {trial: before.get(trial) for trial in seen} == seen
    wait_for(lambda: not members(process.pid))


@pytest.mark.exhaustive
def test_the_search_after_a_killed_one_changes_nothing_that_had_ended(evoengine, under_way):
    db, process = under_way
    process.kill()
    process.wait()
    before = ended(db)
    evoengine(*SEARCH, "--trials", 1, "--seed", 5, "--jobs", 1, "--db", db)
    after = ended(db)
    assert {trial: after.get(trial) for trial in before} == before


def members(session: int) -> list[str]:
    command = ["ps", "-o", "pid=,stat=", "-g", str(session)]
    found = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    return [line for line in found if "Z" not in line]


def candidates(db: Path) -> dict[int, Candidate]:
    try:
        with open_ledger(str(db), create=False) as ledger:
            return {c.trial: c for c in ledger.candidates()}
    except NothingFound:
        return {}


def count_ended(db: Path) -> int:
    """Without the checks of opening a ledger, so that a search that is waited for need not wait for them."""
    try:
        with closing(sqlite3.connect(f"file:{db}?mode=ro", uri=True)) as tables:
            return tables.execute("SELECT count(*) FROM candidates WHERE outcome IS NOT NULL").fetchone()[0]
    except sqlite3.OperationalError:  # it is not there yet, or has no tables
        return 0


def ended(db: Path) -> dict[int, Candidate]:
    return {trial: c for trial, c in candidates(db).items() if c.outcome}
