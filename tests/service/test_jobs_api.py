"""Asking for searches over HTTP: what is taken, what is refused and how, and what is asked twice."""

from __future__ import annotations

import pytest

from evoengine.errors import UsageError
from evoengine.gpu import find_gpu
from evoengine.service.jobs import QUEUED
from evoengine.workloads import parse_problem

GEMM = {"problems": ["gemm:m64,n64,k64,fp16"], "gpu": "h100"}


def sentence_of(call, *arguments) -> str:
    with pytest.raises(UsageError) as refused:
        call(*arguments)
    return str(refused.value)


def test_a_job_is_accepted_and_found_where_the_answer_says(service):
    http = service().http
    answer = http.post("/v1/jobs", json={**GEMM, "trials": 7, "priority": 3})
    assert (answer.status_code, answer.headers["location"]) == (202, "/v1/jobs/1")
    job = http.get(answer.headers["location"]).json()
    assert (job["id"], job["state"], job["gpu"], job["priority"]) == (1, QUEUED, "h100", 3)
    assert [part["problem"] for part in job["parts"]] == GEMM["problems"]
    assert job["progress"] == {"stage": None, "done": 0, "total": 7, "best": None}
    assert http.get("/v1/jobs").json()["jobs"] == [job]
    assert http.get("/v1/jobs?state=done").json()["jobs"] == []


def test_problems_are_kept_as_the_ledger_writes_them_and_none_twice(service):
    http = service().http
    answer = http.post(
        "/v1/jobs", json={"workload": "gemm", "gpu": "H100", "problems": ["k64,m64,n64,fp16", *GEMM["problems"]]}
    )
    assert answer.json()["request"]["problems"] == GEMM["problems"]
    assert answer.json()["gpu"] == "h100"
    example = http.post("/v1/jobs", json={"workload": "gemm", "gpu": "h100"}).json()["request"]["problems"]
    assert len(example) == 1 and example[0].startswith("gemm:")


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"gpu": "h1000"}, lambda: sentence_of(find_gpu, "h1000")),
        ({"problems": ["gem:m64"]}, lambda: sentence_of(parse_problem, "gem:m64")),
        ({"problems": ["gemm:m64,n64"]}, lambda: sentence_of(parse_problem, "gemm:m64,n64")),
        ({"workload": "gem", "problems": []}, lambda: sentence_of(parse_problem, "gem:")),
        ({"families": ["mna"]}, lambda: "not 'mna'; did you mean mma?"),
        ({"families": ["wgmma"], "gpu": "a100"}, lambda: "the family wgmma is not possible on a100"),
        ({"sampler": "evolutoin"}, lambda: "did you mean evolution?"),
        ({"objective": "flops"}, lambda: "flops"),
        ({"device": "gpu"}, lambda: "'gpu' is not one of auto, emulator, cuda and recorded:FILE"),
        ({"device": "recorded:/etc/passwd"}, lambda: "the server has no recorded space '/etc/passwd'"),
        ({"device": "recorded:../evo.db"}, lambda: "the server has no recorded space"),
        ({"problems": ["attention:b1,h2,s64,d32,fp16"], "workload": "gemm"}, lambda: "is of the workload attention"),
        ({"trials": 0}, lambda: "--trials is 0; it must be at least 1"),
        ({"trials": 10_001}, lambda: "this server allows at most 10000"),
        ({"minutes": 0}, lambda: "--minutes is 0"),
        ({"minutes": 1e9}, lambda: "this server allows at most 1440"),
        ({"gpu": None}, lambda: "must name its GPU"),
        ({"problems": []}, lambda: "a job must name problems"),
        ({"kernel": "/data/mine"}, lambda: "'kernel' is not a field of this request"),
        ({"problem": "gemm:m64"}, lambda: "'problem' is not a field of this request; did you mean problems?"),
        ({"gpus": ["h100"]}, lambda: "'gpus' is not a field of this request; did you mean gpu?"),
        ({"priority": 101}, lambda: "priority: Input should be less than or equal to 100"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)  # fmt: skip
def test_what_cannot_be_meant_is_refused_in_the_words_of_the_command_line(service, wrong, sentence):
    parts = service()
    answer = parts.http.post("/v1/jobs", json=GEMM | wrong)
    assert (answer.status_code, answer.headers["content-type"]) == (422, "application/problem+json")
    assert sentence() in answer.json()["detail"]
    assert (answer.json()["status"], answer.json()["title"]) == (422, "Unprocessable Entity")
    assert parts.jobs.newest() == []


@pytest.mark.parametrize("body", [b"x" * 3000, iter([b"x" * 1000] * 3)], ids=["stated", "in pieces"])
def test_a_body_that_is_too_large_is_refused(service, body):
    answer = service(max_body=2000).http.post("/v1/jobs", content=body, headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.headers["content-type"]) == (413, "application/problem+json")
    assert "exceeds 2000 bytes" in answer.json()["detail"]


def test_a_key_is_answered_alike_for_the_same_request_and_refused_for_another(service):
    parts = service()

    def ask(key: str, **changes: object):
        return parts.http.post("/v1/jobs", json=GEMM | changes, headers={"Idempotency-Key": key})

    first, again, other = ask("one"), ask("one", trials=60), ask("two")
    assert (first.json(), again.status_code) == (again.json(), 202)
    assert other.json()["id"] != first.json()["id"]
    refused = ask("one", trials=61)
    assert (refused.status_code, len(parts.jobs.newest())) == (422, 2)
    assert "the Idempotency-Key 'one' was used for another request, job 1" in refused.json()["detail"]


def test_a_cancelled_job_stays_as_it_is_however_often_it_is_cancelled(service):
    http = service().http
    http.post("/v1/jobs", json=GEMM)
    first, again = http.delete("/v1/jobs/1"), http.delete("/v1/jobs/1")
    assert (first.status_code, first.json()["state"]) == (200, "cancelled")
    assert (again.status_code, again.json()) == (200, first.json())


@pytest.mark.parametrize(
    "path",
    ["/v1/jobs/77", "/v1/jobs/77/events", f"/v1/kernels/{'0' * 64}/source", "/v1/cache/k", "/v1/best", "/no"],
)
def test_what_is_not_there_is_said_to_be_missing(service, path):
    answer = service().http.get(path)
    assert (answer.status_code, answer.headers["content-type"]) == (404, "application/problem+json")
    assert answer.json()["detail"]


def test_a_submitter_has_so_many_unfinished_jobs_and_no_more(service):
    parts = service(max_jobs=2)
    assert [parts.http.post("/v1/jobs", json=GEMM).status_code for _ in range(3)] == [202, 202, 429]
    refused = parts.http.post("/v1/jobs", json=GEMM)
    assert "you have 2 unfinished jobs" in refused.json()["detail"] and int(refused.headers["retry-after"]) > 0
    parts.http.delete("/v1/jobs/1")
    assert parts.http.post("/v1/jobs", json=GEMM).status_code == 202


def test_jobs_are_listed_newest_first_in_pages(service):
    http = service().http
    for _ in range(3):
        http.post("/v1/jobs", json=GEMM)
    pages = [http.get("/v1/jobs?limit=2").json()["jobs"], http.get("/v1/jobs?limit=2&before=2").json()["jobs"]]
    assert [[job["id"] for job in page] for page in pages] == [[3, 2], [1]]


def test_a_wait_ends_with_the_job(service):
    parts = service()
    parts.http.post("/v1/jobs", json=GEMM)
    parts.jobs.cancel(1)
    assert parts.http.get("/v1/jobs/1?wait=60").json()["state"] == "cancelled"
    assert parts.http.get("/v1/jobs/1?wait=61").status_code == 422
