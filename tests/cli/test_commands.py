"""The door itself: help, versions, laziness, doctor, interruption."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from evoengine.cli.main import COMMANDS

HEAVY = ("torch", "cupy", "optuna", "sqlalchemy", "rich", "jinja2", "numpy", "pebble", "alembic")


def test_help_names_every_command(evoengine):
    done = evoengine("--help")
    assert done.returncode == 0
    assert all(f"  {name} " in done.stdout for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself_and_its_options(evoengine, name):
    done = evoengine(name, "--help")
    assert done.returncode == 0
    assert COMMANDS[name].split(",")[0].split(" of ")[0][:20] in done.stdout
    options = [line for line in done.stdout.splitlines() if line.strip().startswith("--")]
    assert options


def test_help_imports_nothing_heavy():
    script = f"import sys, evoengine.cli.main as m\nfrom click.testing import CliRunner\nCliRunner().invoke(m.evoengine, ['--help'])\nprint([n for n in {HEAVY!r} if n in sys.modules])"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout.strip() == "[]"


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
    assert {f["name"] for f in found["findings"]} == {"Python", "CUDA compiler", "disassembler", "C++ compiler", "torch", "GPU"}
    assert all(f["remedy"] for f in found["findings"] if not f["here"])


def test_doctor_names_the_remedy_for_a_missing_compiler(evoengine, tmp_path):
    done = evoengine("doctor", env={"PATH": str(tmp_path), "CXX": ""})
    assert done.returncode == 3
    assert "apt install g++" in done.stdout


def test_ctrl_c_stops_a_search_with_what_there_is_and_the_next_one_goes_on(evoengine, tmp_path):
    db = tmp_path / "evo.db"
    arguments = ["search", "--problem", "b1,h2,s128,d32,fp16", "--trials", "500", "--seed", "4", "--db", str(db), "--device", "emulator"]
    process = subprocess.Popen(
        [sys.executable, "-m", "evoengine", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    wait_for(lambda: len(ended(evoengine, db)) >= 2)
    os.killpg(process.pid, signal.SIGINT)  # a terminal sends it to the whole group
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "interrupted" in err and "Traceback" not in err
    assert "TFLOPS" in out
    left = [c for c in history(evoengine, db) if c["outcome"] is None]
    evoengine("search", *arguments[1:3], "--trials", 4, "--seed", 5, "--db", db, "--device", "emulator")
    after = {c["trial"]: c for c in history(evoengine, db)}
    assert all(after[c["trial"]]["outcome"] and after[c["trial"]]["run"] == 2 for c in left)


def test_a_killed_search_loses_nothing_and_leaves_no_process(evoengine, tmp_path):
    db = tmp_path / "evo.db"
    arguments = ["search", "--problem", "b1,h2,s128,d32,fp16", "--trials", "500", "--db", str(db), "--device", "emulator"]
    process = subprocess.Popen([sys.executable, "-m", "evoengine", *arguments], stderr=subprocess.DEVNULL, start_new_session=True)
    seen: dict[int, dict] = {}
    try:
        wait_for(lambda: seen.update(ended(evoengine, db)) or len(seen) >= 2)
    finally:
        process.kill()
        process.wait()
    before = ended(evoengine, db)
    assert {trial: before.get(trial) for trial in seen} == seen
    wait_for(lambda: not members(process.pid))
    evoengine("search", *arguments[1:3], "--trials", 3, "--db", db, "--device", "emulator")
    after = ended(evoengine, db)
    assert {trial: after.get(trial) for trial in before} == before


def members(group: int) -> list[str]:
    found = subprocess.run(["ps", "-o", "pid=,stat=", "-g", str(group)], capture_output=True, text=True).stdout.splitlines()
    return [line for line in found if "Z" not in line]


def history(evoengine, db) -> list[dict]:
    done = evoengine("history", "--json", "--db", db)
    return json.loads(done.stdout) if done.returncode == 0 else []


def ended(evoengine, db) -> dict[int, dict]:
    return {c["trial"]: c for c in history(evoengine, db) if c["outcome"]}


def wait_for(condition, seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(1)
