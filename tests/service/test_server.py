"""`evoengine serve` in processes of its own: killed in mid-stream, started again, told to stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from evoengine.ledger.store import open_ledger
from tests.service.conftest import Running, running
from tests.support.recorded import cache
from tests.support.waiting import wait_for

TRIALS = 24
MANY = 300
"""of which no more than a part has ended when the first is told"""


def children(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += map(int, (task / "children").read_text().split())
    return found


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.exhaustive  # test_events.py and test_takeover.py show its parts without processes
def test_a_server_is_killed_and_started_again_in_mid_stream_and_nothing_is_lost_or_told_twice(tmp_path, recorded):
    db = str(tmp_path / "evo.db")
    cache(recorded / "test.json", paddings=MANY // 10)
    with running(tmp_path, db=db, recorded=recorded) as server:
        client = server.client()
        job = client.submit(device="recorded:test.json", trials=MANY)
        told = []
        listening = threading.Thread(target=lambda: told.extend(client.events(job.id, patience=300.0)))
        following = server.client().events(job.id)
        for event in following:  # until its search has begun
            if event.event == "trial":
                break
        listening.start()
        [worker] = children(server.process.pid)
        server.kill()
        wait_for(lambda: not is_alive(worker))  # it ends with its server
        server.start()
        listening.join(timeout=300)
        ended = client.job(job.id)
        assert (ended.state, ended.progress["done"], ended.why) == ("done", MANY, None)
        assert [event.number for event in told] == list(range(1, ended.events + 1))
        states = [event.data["state"] for event in told if event.event == "state"]
        assert states == ["queued", "running", "queued", "running", "done"]
        trials = [event.data["trial"] for event in told if event.event == "trial"]
        with open_ledger(db, create=False) as ledger:
            known = [c.trial for run in ended.parts[0]["runs"] for c in ledger.candidates(run=run) if c.outcome]
        assert sorted(trials) == sorted(known) and len(trials) == MANY
        assert server.stop() == 0
    assert "Traceback" not in server.said.read_text(), server.said.read_text()


@pytest.mark.exhaustive
def test_a_server_that_is_told_to_stop_gives_its_jobs_back(tmp_path, recorded):
    db = str(tmp_path / "evo.db")
    with running(tmp_path, db=db, recorded=recorded) as first:
        client = first.client()
        job = client.submit(problems=["gemm:m64,n64,k64,fp16"], gpu="h100", device="emulator", trials=50)
        next(event for event in client.events(job.id) if event.event == "trial")
        assert first.stop() == 0
        second = Running(tmp_path, db=db, recorded=recorded, cpu_jobs=0).start()
        try:
            found = second.client().job(job.id)
            assert found.state in ("queued", "waiting")
            assert found.progress["done"] >= 1
        finally:
            second.stop()


@pytest.mark.exhaustive
def test_a_killed_worker_is_started_again(tmp_path, recorded):
    with running(tmp_path, db=str(tmp_path / "evo.db"), recorded=recorded) as server:
        client = server.client()
        job = client.submit(device="recorded:test.json", trials=TRIALS)
        next(event for event in client.events(job.id) if event.event == "trial")
        [worker] = children(server.process.pid)
        os.kill(worker, signal.SIGKILL)
        told = list(client.events(job.id))
        assert [event.number for event in told] == list(range(1, len(told) + 1))
        assert client.job(job.id).progress["done"] == TRIALS
        assert any("SIGKILL" in str(event.data.get("why")) for event in told)


SERVED = """
import sys
from evoengine.cli.main import main
code = main()
print("torch" in sys.modules)
sys.exit(code)
"""


def test_a_server_that_cannot_start_says_why_in_a_sentence_and_has_not_loaded_torch(tmp_path):
    arguments = ("serve", "--db", str(tmp_path / "evo.db"), "--host", "0.0.0.0")
    refused = subprocess.run([sys.executable, "-c", SERVED, *arguments], capture_output=True, text=True, timeout=300)
    assert refused.returncode == 2
    assert "this server requires tokens, and there is none" in refused.stderr
    assert refused.stdout == "False\n"  # it takes two seconds and 200 MB
