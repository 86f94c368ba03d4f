"""Kernels by the SHA-256 of their source, the pages that people look at, health and figures."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from evoengine.ledger.tables import CandidateRow
from evoengine.publish.folder import write_folder
from evoengine.records import EXECUTOR, Kind, Outcome
from evoengine.service.client import unpacked
from evoengine.service.jobs import STATES
from evoengine.service.tables import JobRow
from evoengine.tuning.exporting import bundle
from evoengine.views import service as views
from evoengine.views.boards import WorkloadsView
from evoengine.views.results import BestTrialsView, NearestTrialView
from evoengine.views.trials import OneTrialView, TrialPageView
from tests.support.ledger_examples import PROBLEM, a_binary, a_figure, a_source, a_verdict, add_ranked, start_run
from tests.support.promises import require_shape

GEMM = {"problems": ["gemm:m64,n64,k64,fp16"], "gpu": "h100"}
SHA256 = a_source().sha256
HOSTILE = "<script>alert(1)</script>\x1b[31m\u202e\"'&"


@pytest.fixture
def with_kernel(service, ledger):
    parts = service()
    parts.trial = add_ranked(ledger, start_run(ledger), a_figure(42.0, Kind.MEASURED))
    ledger.record_verdict(parts.trial, replace(a_verdict(), device=EXECUTOR))
    return parts


def test_a_kernel_whose_gate_was_not_finished_has_no_bundle(service, ledger):
    parts = service()
    add_ranked(ledger, start_run(ledger), a_figure(42.0, Kind.MEASURED))
    answer = parts.http.get(f"/v1/kernels/{SHA256}/bundle")
    assert answer.status_code == 404 and "its gate is not finished" in answer.json()["detail"]


def test_a_kernel_is_given_as_source_machine_code_page_and_bundle(with_kernel, ledger, tmp_path):
    http, at = with_kernel.http, f"/v1/kernels/{SHA256}"
    assert http.get(f"{at}/source").text == a_source().text
    assert http.get(f"{at}/cubin").content == a_binary().cubin
    page = http.get(f"{at}/json").json()
    assert (page["trial"], page["source_sha256"], page["figure"]["tflops"]) == (with_kernel.trial, SHA256, 42.0)
    packed = http.get(f"{at}/bundle")
    assert packed.headers["content-type"] == "application/zip"
    files = unpacked(packed.content)
    assert files["kernel.cu"] == a_source().text.encode() and files["kernel.cubin"] == a_binary().cubin
    assert json.loads(files["kernel.json"])["provenance"]["trial"] == with_kernel.trial
    written = {path.name: path.read_bytes() for path in write_folder(tmp_path / "out", files)}
    again = bundle(ledger, with_kernel.trial)
    of_its_moment = {"trace.json", "SHA256SUMS"}  # a trace says when it was exported
    assert written.keys() == again.keys() > of_its_moment
    assert all(written[name] == again[name] for name in written.keys() - of_its_moment)


def test_what_is_known_to_be_wrong_is_given_to_nobody(with_kernel, ledger):
    ledger.record_verdict(with_kernel.trial, a_verdict(Outcome.INCORRECT))
    ledger.finish(with_kernel.trial, Outcome.INCORRECT, "wrong", None, None)
    for part in ("source", "cubin", "json", "bundle"):
        answer = with_kernel.http.get(f"/v1/kernels/{SHA256}/{part}")
        assert (answer.status_code, SHA256 in answer.json()["detail"]) == (404, True)
    assert with_kernel.http.get("/v1/best").status_code == 404


def test_a_kernel_of_another_gpu_is_another(with_kernel):
    assert with_kernel.http.get(f"/v1/kernels/{SHA256}/source?gpu=h100").status_code == 200
    assert with_kernel.http.get(f"/v1/kernels/{SHA256}/source?gpu=a100").status_code == 404


@pytest.mark.parametrize("wrong", ["abc", "A" * 64, "0" * 63 + "g", "..%2f..%2fetc%2fpasswd"])
def test_what_is_no_sha256_names_no_kernel(service, wrong):
    assert service().http.get(f"/v1/kernels/{wrong}/source").status_code in (404, 422)


def test_the_pages_show_what_others_wrote_as_text(with_kernel, ledger):
    http = with_kernel.http
    http.post("/v1/jobs", json=GEMM)
    with ledger.database.writing() as session:
        job = session.get_one(JobRow, 1)
        job.why = job.gpu = HOSTILE
        job.parts = [{**job.parts[0], "problem": HOSTILE, "ended": HOSTILE}]
        session.get_one(CandidateRow, with_kernel.trial).config = {HOSTILE: HOSTILE}
    for page in ("/", "/jobs/1"):
        answer = http.get(page)
        assert answer.status_code == 200
        assert "<script" not in answer.text and "\x1b" not in answer.text and "\u202e" not in answer.text
        assert "&lt;script&gt;alert(1)" in answer.text
        assert "script-src" not in (policy := answer.headers["content-security-policy"])
        assert policy.startswith("default-src 'none'")


def test_the_status_page_shows_jobs_servers_and_the_best(with_kernel):
    with_kernel.http.post("/v1/jobs", json=GEMM)
    with_kernel.executors.beat(())
    page = re.sub(r"\s+", " ", re.sub("<[^>]+>", " ", with_kernel.http.get("/").text))
    for shown in ("1 queued", "gemm:m64,n64,k64,fp16", "0/60", "here", "1 at once", "42.00 TFLOPS", "source bundle"):
        assert shown in page
    assert page.index("Best kernels") < page.index("Jobs") < page.index("Servers that run jobs")
    assert re.search(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", page)  # when it was asked for
    assert 'http-equiv="refresh"' in with_kernel.http.get("/").text


def test_the_status_page_says_who_asked(service):
    parts = service(require_tokens=True)
    token = parts.state.tokens.new("alice", "work", None)
    headers = {"Authorization": f"Bearer {token}"}
    assert parts.http.post("/v1/jobs", json=GEMM, headers=headers).status_code == 202
    assert "by alice" in parts.http.get("/", headers=headers).text


def test_the_pages_of_an_empty_service_say_that_there_is_nothing(service):
    page = service().http.get("/").text
    assert page.count("none yet") == 2 and "jobs wait until one is up" in page


def test_the_api_is_described(service):
    parts = service()
    page = parts.http.get("/docs").text
    described = parts.http.get("/openapi.json").json()
    assert all(path in page for path in described["paths"])
    assert "Idempotency-Key" in json.dumps(described) or "idempotency-key" in json.dumps(described)


def test_every_answer_in_json_has_a_shape(service):
    described = service().app.openapi()
    unshaped = {
        path
        for path, operations in described["paths"].items()
        for operation in operations.values()
        for code, response in operation["responses"].items()
        if code < "300" and not (response.get("content", {}).get("application/json", {"schema": 1}).get("schema"))
    }
    assert unshaped == {"/v1/cache/{key}"}  # which gives what was stored
    shapes = described["components"]["schemas"]
    trial = shapes["TrialView"]
    assert trial["required"] == list(trial["properties"]) and "tflops" in trial["required"]
    assert shapes["JobView"]["properties"]["state"]["enum"] == list(STATES)


@pytest.mark.parametrize(
    ("path", "shape"),
    [
        ("/v1/best", OneTrialView),
        ("/v1/best?top=3", BestTrialsView),
        (f"/v1/best?nearest=true&gpu=h200&problem={PROBLEM}", NearestTrialView),
        (f"/v1/kernels/{SHA256}/json", TrialPageView),
        ("/v1/jobs", views.JobsView),
        ("/v1/jobs/1", views.JobView),
        ("/v1/gpus", views.BoardsAndServersView),
        ("/v1/problems", WorkloadsView),
        ("/v1/cache", views.CacheEntriesView),
        ("/livez", views.HealthView),
    ],
)
def test_an_answer_is_of_its_shape(with_kernel, path, shape):
    http = with_kernel.http
    assert http.post("/v1/jobs", json=GEMM).status_code == 202
    assert http.put("/v1/cache/mine", json={"a": 1}).status_code == 204
    with_kernel.executors.beat([])
    require_shape(shape, http.get(path).text)


def test_health_and_figures(service):
    http = service().http
    assert http.get("/livez").json() == http.get("/readyz").json() == {"status": "ok"}
    http.post("/v1/jobs", json=GEMM)
    figures = http.get("/metrics").text
    assert 'evoengine_jobs{state="queued"} 1.0' in figures
    assert 'evoengine_requests_total{method="POST",route="/v1/jobs",status="202"} 1.0' in figures


def test_gpus_and_problems_are_those_of_the_commands(service):
    http = service().http
    told = http.get("/v1/gpus")
    assert told.status_code == 200, told.text
    assert {"h100", "rtx2080ti"} <= {gpu["key"] for gpu in told.json()["gpus"]}
    assert {w["workload"] for w in http.get("/v1/problems").json()["workloads"]} >= {"gemm", "attention"}


def test_configurations_of_vllms_kernels_are_given_as_files(with_kernel):
    missing = with_kernel.http.get("/v1/fused_moe?gpu=h100")
    assert (
        missing.status_code == 404
        and "no configuration of vLLM's or SGLang's kernels on h100" in missing.json()["detail"]
    )
    assert with_kernel.http.get("/v1/fused_moe?gpu=h1000").status_code == 422
    assert with_kernel.http.get("/v1/fused_moe").status_code == 422
