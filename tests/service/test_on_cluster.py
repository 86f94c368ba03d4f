"""A server whose jobs run on a Ray cluster: which jobs it takes, and one job on a real cluster of this machine."""

from __future__ import annotations

import pytest

from evoengine.errors import UsageError
from evoengine.ledger.store import open_ledger
from evoengine.service.executors import Executors, Slot, slots_here
from evoengine.service.jobs import WAITING, Jobs
from evoengine.service.settings import load_settings
from tests.service.conftest import PATIENCE, running
from tests.support.ledger_examples import GPU, PROBLEM

ON_CLUSTER = Slot(0, None, (GPU,))


def request(**changes: object) -> dict[str, object]:
    return {"problems": [PROBLEM], "gpu": GPU, "trials": 5, "device": "emulator", "priority": 0} | changes


@pytest.fixture
def jobs(ledger) -> Jobs:
    return Jobs(ledger)


@pytest.fixture
def cluster(ledger) -> Executors:
    made = Executors(ledger, "cluster", [ON_CLUSTER], PATIENCE)
    made.beat(())
    return made


@pytest.mark.parametrize("device", ["emulator", "cuda", "auto"])
def test_it_takes_jobs_with_and_without_a_gpu(jobs, cluster, device):
    jobs.submit(request(device=device), 0, None, 100)
    assert cluster.claim(ON_CLUSTER).id == 1


def test_it_leaves_gpus_that_its_cluster_does_not_have_and_says_so(jobs, cluster):
    jobs.submit(request(device="cuda", gpu="a100"), 0, None, 100)
    cluster.beat(())
    assert cluster.claim(ON_CLUSTER) is None
    assert jobs.find(1).state == WAITING and "no running server has a GPU for a100" in jobs.find(1).why


def test_what_was_predicted_waits_for_a_servers_own_gpu(jobs, ledger, cluster):
    alone = Executors(ledger, "alone", [Slot(0)], PATIENCE)
    cluster.leave()
    alone.beat(())
    jobs.submit(request(device="auto"), 0, None, 100)
    held = alone.claim(Slot(0))
    searched = [part | {"ended": "all trials done"} for part in held.parts]
    jobs.note(held.id, held.fence, searched)
    jobs.wait(held.id, held.fence, "searched and predicted")
    cluster.beat(())
    assert cluster.claim(ON_CLUSTER) is None
    assert jobs.find(1).state == WAITING


def test_its_slots_name_the_kinds_of_gpu_that_the_operator_states(monkeypatch):
    monkeypatch.setenv("EVOENGINE_CLUSTER", "ray://head:10001")
    monkeypatch.setenv("EVOENGINE_CLUSTER_GPUS", "H100, a100")
    assert [slot.gpus for slot in slots_here(load_settings(cpu_jobs=2))] == [("h100", "a100")] * 2


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("EVOENGINE_CLUSTER", "head", "EVOENGINE_CLUSTER 'head' is not the address of a cluster: write"),
        ("EVOENGINE_CLUSTER_GPUS", "h100,h1000", "EVOENGINE_CLUSTER_GPUS: .*h1000"),
    ],
)
def test_a_setting_that_cannot_be_meant_is_named(monkeypatch, name, value, said):
    monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=said):
        load_settings()


@pytest.mark.exhaustive
def test_a_job_runs_on_a_cluster(tmp_path, recorded):
    pytest.importorskip("ray", reason="needs Ray: pip install 'evoengine[ray]'")
    db = str(tmp_path / "evo.db")
    with running(tmp_path, db=db, recorded=recorded, cluster="local") as server:
        client = server.client()
        job = client.submit(problems=["gemm:m64,n64,k64,fp16"], gpu="h100", device="emulator", trials=4)
        told = list(client.events(job.id, patience=300.0))
        ended = client.job(job.id)
        assert (ended.state, ended.progress["done"]) == ("done", 4), server.said.read_text()
    assert any("1 node with" in str(event.data.get("text")) for event in told)
    with open_ledger(db, create=False) as ledger:
        assert len([c for c in ledger.candidates() if c.outcome]) >= 4
