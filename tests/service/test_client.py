"""The client, and the commands that use it: what they say is what the same call says on this machine."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile

import pytest
from click.testing import CliRunner

from evoengine.cli.main import evoengine
from evoengine.errors import EvoengineError, MachineError, NothingFound, UsageError
from evoengine.publish.folder import CHECKSUMS, checksums
from evoengine.records import Kind
from evoengine.service.client import Client, unpacked
from evoengine.service.executors import Slot
from tests.support.ledger_examples import GPU, PROBLEM, a_figure, add_ranked, start_run

GEMM = {"problems": ["gemm:m64,n64,k64,fp16"], "gpu": "h100"}


def call(*arguments: object) -> tuple[int, str, str]:
    """Exit code, stdout and what was said, the sentence of an error too."""
    done = CliRunner().invoke(evoengine, [str(each) for each in arguments], standalone_mode=False)
    if isinstance(done.exception, EvoengineError):
        return done.exception.exit_code, done.stdout, f"{done.stderr}{done.exception}"
    assert done.exception is None, done.exception
    return done.return_value or 0, done.stdout, done.stderr


def packed(files: dict[str, bytes]) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return made.getvalue()


def test_best_of_a_service_is_the_json_of_the_command_and_304_where_it_is_still_that(served, ledger):
    run = start_run(ledger)
    add_ranked(ledger, run, a_figure(42.0, Kind.MEASURED))
    parts = served()
    remote, local = call("best", "--server", parts.url, "--json"), call("best", "--db", ledger.url, "--json")
    assert remote[:2] == local[:2] and json.loads(local[1])["tflops"] == 42.0
    assert parts.client.best(GPU, PROBLEM) == json.loads(local[1])
    first = parts.http.get("/v1/best")
    assert first.headers["etag"] == f'"{hashlib.sha256(first.content).hexdigest()}"'
    again = parts.http.get("/v1/best", headers={"If-None-Match": f'"x", W/{first.headers["etag"]}'})
    assert (again.status_code, again.content) == (304, b"")
    assert parts.http.get("/v1/best", headers={"If-None-Match": '"x"'}).status_code == 200
    top = parts.client.ranking(GPU, PROBLEM, top=3)
    assert (top["problem"], top["gpu"], len(top["trials"])) == (PROBLEM, GPU, 1)


def test_a_better_one_is_given_a_second_later(served, ledger, monkeypatch):
    monkeypatch.setattr("evoengine.service.answers.FRESH_SECONDS", 0.0)
    run = start_run(ledger)
    add_ranked(ledger, run, a_figure(42.0, Kind.MEASURED))
    parts = served()
    old = parts.http.get("/v1/best").headers["etag"]
    assert parts.http.get("/v1/best").headers["etag"] == old
    better = add_ranked(ledger, run, a_figure(50.0, Kind.MEASURED), name="better")
    assert parts.client.best()["trial"] == better
    ledger.finish_run(run, "all trials done")
    ledger.remove_runs([run])
    with pytest.raises(NothingFound):
        parts.client.best(GPU, PROBLEM)


def test_the_nearest_answer_says_what_was_asked_and_that_it_is_another(served, ledger):
    add_ranked(ledger, start_run(ledger), a_figure(42.0, Kind.MEASURED))
    parts = served()
    near = parts.client.best(GPU, "attention:b1,h2,s128,d32,fp16", nearest=True)
    assert (near["problem"], near["exact"]) == (PROBLEM, False)
    assert near["asked"] == {"problem": "attention:b1,h2,s128,d32,fp16", "gpu": GPU}
    assert parts.client.best(GPU, PROBLEM, nearest=True)["exact"] is True
    with pytest.raises(NothingFound, match="no correct candidate of the workload"):
        parts.client.best(GPU, "gemm:m64,n64,k64,fp16", nearest=True)


@pytest.mark.parametrize("url", ["localhost:8787", "", "ftp://x", None, 5])
def test_what_is_no_address_is_refused_in_a_sentence(url):
    with pytest.raises(UsageError, match="is not the URL of a service; write http://HOST:PORT"):
        Client(url)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("search", "--server", "{url}", "--gpu", "h1000"), 2, "unknown GPU 'h1000'"),
        (("search", "--server", "{url}"), 2, "--gpu auto means the GPU of this machine"),
        (("search", "--server", "{url}", "--gpu", "h100", "--db", "x.db"), 2, "--db applies to this machine"),
        (("search", "--server", "{url}", "--gpu", "h100", "--kernel", "x"), 2, "--kernel applies to this machine"),
        (("search", "--job", "3"), 2, "--job 3 requires --server"),
        (("search", "--server", "{url}", "--job", "3"), 1, "there is no job 3"),
        (("best", "--server", "{url}"), 1, "the ledger holds no run"),
        (("best", "--server", "{url}", "--pareto"), 2, "--pareto applies to this machine"),
        (("best", "--server", "ftp://x"), 2, "is not the URL of a service"),
        (("best", "--server", "http://me:secret@host"), 2, "must not hold a user name or password"),
        (("best", "--server", "http://127.0.0.1:1"), 3, "cannot be reached"),
        (("retune", "--gpu", "h200", "--server", "{url}"), 1, "holds no correct candidate"),
    ],
)  # fmt: skip
def test_what_a_command_cannot_do_there_it_says_in_a_sentence(served, arguments, code, said):
    url = served().url
    found = call(*(each.format(url=url) for each in arguments))
    assert (found[0], found[1]) == (code, "")
    assert said in found[2] and "secret" not in found[2]


def test_a_search_of_a_service_prints_what_was_found_and_can_be_come_back_to(served, ledger, monkeypatch):
    add_ranked(ledger, start_run(ledger, problem=GEMM["problems"][0]), a_figure(42.0), problem=GEMM["problems"][0])
    parts = served()
    job = parts.client.submit(**GEMM, device="emulator", trials=3, idempotency_key="k")
    assert parts.client.submit(**GEMM, device="emulator", trials=3, idempotency_key="k") == job
    parts.executors.beat(())
    held = parts.executors.claim(Slot(0))
    trial = {"trial": 9, "outcome": "estimated", "problem": job.parts[0]["problem"]}
    parts.jobs.tell(held.id, held.fence, "trial", trial)
    parts.jobs.finish(held.id, held.fence, "done")
    code, out, said = call("search", "--server", parts.url, "--job", job.id, "--json")
    shown = json.loads(out)
    assert (code, shown["job"], shown["state"], shown["outcomes"]) == (0, 1, "done", {"estimated": 1})
    assert [best["tflops"] for best in shown["best"]] == [42.0]
    assert "job 1 is done" in said


def test_ctrl_c_leaves_the_job_to_go_on_and_says_how_to_come_back(served, monkeypatch):
    parts = served()

    def interrupted(*_: object):
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(Client, "events", interrupted)
    code, _, said = call("search", "--server", parts.url, "--gpu", "h100", *("--problem", GEMM["problems"][0]))
    assert code == 130
    assert f"evoengine search --server {parts.url} --job 1 follows it again" in said
    assert parts.jobs.find(1).state == "queued"


def test_a_job_that_failed_is_an_error_with_its_reason(served):
    parts = served()
    parts.client.submit(**GEMM, device="emulator")
    parts.executors.beat(())
    held = parts.executors.claim(Slot(0))
    parts.jobs.finish(held.id, held.fence, "failed", "the disk is full")
    code, _, said = call("search", "--server", parts.url, "--job", 1)
    assert (code, "job 1 failed: the disk is full" in said) == (3, True)


def test_events_go_on_over_a_connection_that_breaks(served, monkeypatch):
    parts = served()
    parts.client.submit(**GEMM, device="emulator")
    parts.executors.beat(())
    held = parts.executors.claim(Slot(0))
    monkeypatch.setattr("evoengine.service.client.RECONNECT_SECONDS", 0.0)
    stream, left = Client._stream, [2]

    def breaking(client, number, after):
        for event in stream(client, number, after):
            yield event
            if left[0]:
                left[0] -= 1
                raise MachineError("it broke")
            if event.number == 4:
                parts.jobs.finish(held.id, held.fence, "done")

    monkeypatch.setattr(Client, "_stream", breaking)
    for text in "ab":
        parts.jobs.tell(held.id, held.fence, "message", {"text": text})
    assert [event.number for event in parts.client.events(1)] == [1, 2, 3, 4, 5]


def test_the_token_comes_from_the_environment_or_a_file(served, monkeypatch, tmp_path):
    parts = served(require_tokens=True)
    token = parts.state.tokens.new("me", "read", None)
    code, _, said = call("best", "--server", parts.url)
    assert (code, "requires a token" in said, "EVOENGINE_TOKEN_FILE" in said) == (2, True, True)
    monkeypatch.setenv("EVOENGINE_TOKEN", token)
    assert call("best", "--server", parts.url)[0] == 1  # an empty ledger
    file = tmp_path / "token"
    file.write_text(f"{token}\n")
    monkeypatch.setenv("EVOENGINE_TOKEN_FILE", str(file))
    assert "both EVOENGINE_TOKEN and EVOENGINE_TOKEN_FILE are set" in call("best", "--server", parts.url)[2]
    monkeypatch.delenv("EVOENGINE_TOKEN")
    assert call("best", "--server", parts.url)[0] == 1
    file.write_text("evo_\u0000x")
    assert "the token has invalid characters" in call("best", "--server", parts.url)[2]


WHOLE = {"kernel.cu": b"text", "kernel.cubin": b"\x7fELF"}


def test_a_bundle_is_taken_as_its_checksums_say():
    assert unpacked(packed({**WHOLE, CHECKSUMS: checksums(WHOLE).encode()})) == WHOLE


@pytest.mark.parametrize(
    "sent",
    [
        b"no zip", b"", packed(WHOLE), packed({**WHOLE, CHECKSUMS: b""}),
        packed({**WHOLE, "kernel.cu": b"other", CHECKSUMS: checksums(WHOLE).encode()}),
        *(packed({name: b"x", CHECKSUMS: checksums({name: b"x"}).encode()})
          for name in ("../x", "/etc/x", "a/b", "..", ".profile", "a\\b")),
        packed({f"{n}": b"" for n in range(100)}),
    ],
)  # fmt: skip
def test_a_bundle_that_is_hostile_or_damaged_is_refused(sent):
    with pytest.raises(MachineError):
        unpacked(sent)


def test_a_bundle_that_would_fill_the_disk_is_refused_before_it_is_unpacked(monkeypatch):
    monkeypatch.setattr("evoengine.service.client.LARGEST_BUNDLE", 1000)
    with pytest.raises(MachineError, match="is larger than any"):
        unpacked(packed({"kernel.cu": bytes(2000)}))


def test_what_other_tuners_keep_comes_back_as_it_was_newest_first(served):
    client = served().client
    assert client.cached("helion.a") is None
    for key, data in (("helion.a", '{"config": 1}'), ("other.b", "{}"), ("helion.c", '{"config":  "µ"}')):
        client.store(key, data)
    client.store("helion.a", '{"config": 2}')
    assert client.cached("helion.c") == '{"config":  "µ"}'
    assert client.all_cached("helion.") == ['{"config": 2}', '{"config":  "µ"}']
    assert client.all_cached("helion.", limit=1) == ['{"config": 2}']
    for wrong in ("[]", "no JSON", '{"a": 1, "a": 2}'):
        with pytest.raises(UsageError, match="cannot be stored"):
            client.store("k", wrong)


def test_retune_queues_every_problem_once_nearest_boards_first(served, ledger):
    far, near = "gemm:m64,n64,k64,fp16", PROBLEM
    add_ranked(ledger, start_run(ledger, gpu="rtx2080ti", problem=far), a_figure(1.0), gpu="rtx2080ti", problem=far)
    add_ranked(ledger, start_run(ledger), a_figure(2.0))
    parts = served()
    made = parts.client.retune("h200", trials=3)
    assert [(job.parts[0]["problem"], job.gpu, job.request["trials"]) for job in made] == [
        (near, "h200", 3), (far, "h200", 3)
    ]  # fmt: skip
    assert parts.client.retune("h200") == []
    code, out, _ = call("retune", "--gpu", "b200", "--workload", "gemm", "--db", ledger.url, "--json")
    assert code == 0 and [job["problem"] for job in json.loads(out)["jobs"]] == [far]


def test_a_client_takes_the_token_of_the_environment_unless_it_is_given_one(monkeypatch):
    monkeypatch.setenv("EVOENGINE_TOKEN", "evo_of_the_environment")
    with Client("http://127.0.0.1:1") as stated, Client("http://127.0.0.1:1", token="evo_own") as own:
        assert stated._http.headers["Authorization"] == "Bearer evo_of_the_environment"
        assert own._http.headers["Authorization"] == "Bearer evo_own"
    with Client("http://127.0.0.1:1", token="") as none:
        assert "Authorization" not in none._http.headers
    monkeypatch.setenv("EVOENGINE_TOKEN_FILE", "both")
    with pytest.raises(UsageError, match="both EVOENGINE_TOKEN and EVOENGINE_TOKEN_FILE are set"):
        Client("http://127.0.0.1:1")


def test_a_client_submits_and_cancels_within_the_scope_of_its_token(served):
    parts = served(require_tokens=True)

    def client(name: str, scope: str) -> Client:
        return Client(parts.url, parts.state.tokens.new(name, scope, None))

    with (
        client("reader", "read") as reader,
        client("mine", "submit") as mine,
        client("other", "submit") as other,
        client("admin", "admin") as admin,
    ):
        with pytest.raises(UsageError, match="the token reader has scope read; this request needs submit"):
            reader.submit(**GEMM)
        assert reader.jobs() == []
        first, second = mine.submit(**GEMM).id, mine.submit(**GEMM, seed=2).id
        with pytest.raises(UsageError, match="the token reader has scope read; this request needs submit"):
            reader.cancel(first)
        with pytest.raises(UsageError, match=f"job {first} belongs to another token; one of scope admin may cancel it"):
            other.cancel(first)
        assert [job.state for job in reader.jobs()] == ["queued", "queued"]
        assert mine.cancel(first).state == "cancelled"
        assert admin.cancel(second).state == "cancelled"
