"""Whatever a machine does to dispatcher, keeper, coordinator or worker pool: nothing is judged wrongly, lost or left
behind, and what ends says why in a sentence."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.faults.hook import Fault
from tests.faults.table import DATABASES, FAILS, MODULES, NO_ERRORS, NOT_REACHED, PACKAGE, Site, call_sites
from tests.faults.tasks import ORPHANED
from tests.support.made_once import shared_folder

ROOT = Path(__file__).parents[2]
SEEDED, SEED = 40, 31
IN_KEEPER = "keeper"
SCENARIO_OF = {"coordinator": "coordinator", "dispatcher": "dispatcher"}
JUMPS = {"workers": ("workers", "self._pool.schedule"), "keeper": ("keeper", "select.select")} | {
    "coordinator": ("coordinator", "self.ledger.finish"), "dispatcher": ("dispatcher", "self.executors.claim"),
}  # fmt: skip
"""where the clock jumps, by a day either way"""
NEVER_LASTS = {"kept_process.KeptProcess._is_readable: select.select"}
"""sites whose fault is tried once, as are those of opendir: who can never wait for a process waits for ever, and who
cannot read /proc knows of no process to end"""


@dataclass(frozen=True, slots=True)
class Case:
    site: Site
    function: str = ""
    error: int = 0
    always: bool = False

    @property
    def id(self) -> str:
        if self.function == "clock":
            what = f"clock {self.error:+}"
        elif not self.function:
            what = "SIGKILL"
        else:
            what = f"{self.function} {os.strerror(self.error)}{' always' if self.always else ''}"
        return f"{self.site.id}: {what}"

    def request(self, folder: Path) -> dict[str, object]:
        s = self.site
        name = s.call.rpartition(".")[2]
        path = str(PACKAGE / MODULES[s.module])
        fault = Fault(path, s.lines, name, self.function, self.error, self.always, str(folder / "met"))
        scenario = SCENARIO_OF.get(s.module, "workers")
        return {"scenario": scenario, "fault": fault.text(), "in_keeper": s.module == IN_KEEPER, "folder": str(folder)}


def cases() -> Iterator[Case]:
    for site in call_sites():
        if site.id in NOT_REACHED:
            continue
        yield Case(site)
        for function, errors in site.effects:
            for error in errors:
                yield Case(site, function, error)
                if site.id not in NEVER_LASTS and function != "opendir":
                    yield Case(site, function, error, always=True)
        for module, call in JUMPS.values():
            if (site.module, site.call) == (module, call):
                yield Case(site, "clock", 86_400)
                yield Case(site, "clock", -86_400)


ALL = sorted(cases(), key=lambda case: case.id)
OFTEN = set(random.Random(SEED).sample(range(len(ALL)), SEEDED))


@pytest.fixture(scope="session")
def library(tmp_path_factory) -> Path:
    path = shared_folder(tmp_path_factory) / f"libfaults-{os.getpid()}.so"
    source = Path(__file__).with_name("library.c")
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", path, source, "-ldl", "-lpthread"], check=True)
    return path


@pytest.fixture(scope="session")
def ask(library):
    """Has a case tried; the answer of scenarios.py."""
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.faults.scenarios"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        cwd=ROOT, env={**os.environ, "LD_PRELOAD": str(library), "PYTHONPATH": str(ROOT)},
    )  # fmt: skip

    def asked(case: Case, folder: Path) -> dict:
        server.stdin.write(json.dumps(case.request(folder)) + "\n")
        server.stdin.flush()
        return json.loads(server.stdout.readline())

    yield asked
    server.stdin.close()
    server.wait()


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.id, marks=[] if place in OFTEN else [pytest.mark.exhaustive])
        for place, case in enumerate(ALL)
    ],
)
def test_a_fault_at_any_call_leaves_nothing_wrong_lost_or_behind(ask, tmp_path, case):
    found = ask(case, tmp_path)
    assert (tmp_path / "met").exists(), "the scenario does not come to this call: NOT_REACHED in table.py names such"
    assert found["code"] == (0 if case.function or case.site.module == IN_KEEPER else -9), found
    assert all(said.startswith("ended: ") and "\n" not in said for said in found["said"]), found["said"]
    assert (found["left"], found["wrong"]) == ([], [])
    folders = [folder.name for folder in (tmp_path / "tmp").glob("evoengine-worker-*")]
    started = found["code"] == 0 and not any(said.startswith("ended: ") for said in found["said"])
    never_sweeps = case.function == "unlink" or (case.always and "sweep" in case.site.id)
    if not never_sweeps:
        assert set(folders) <= (set() if started else {ORPHANED}), (
            "the next keeper sweeps that one, and no other is left"
        )
    said = (tmp_path / "stderr").read_text()
    assert "Traceback" not in said and "leaked" not in said, said


# ── the table ───────────────────────────────────────────────────────────────────────────────────────────────────────


def missing(sites: list[Site]) -> list[str]:
    return [s.id for s in sites if not (s.call in FAILS or s.call in NO_ERRORS or DATABASES.match(s.call))]


def test_every_call_site_is_in_the_table():
    assert missing(call_sites()) == []


def test_the_table_has_no_call_that_is_made_nowhere():
    made = {site.call for site in call_sites()}
    assert (FAILS.keys() | NO_ERRORS) - made == set()


def test_a_new_call_site_that_is_missing_from_the_table_is_named():
    new = call_sites({"keeper": "class Keeper:\n    def serve(self):\n        os.sendfile(1, 2, 0, 9)\n"})
    assert missing(new) == ["keeper.Keeper.serve: os.sendfile"]
