"""No endpoint starves another, no client the others: reports are drawn once and few at a time, health and the best
kernel have threads of their own, and who is slow or opens many connections is cut off."""

from __future__ import annotations

import asyncio
import gzip
import http.client
import socket
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from urllib.parse import urlsplit

import pytest

from evoengine.records import Kind
from evoengine.sandbox.kept_process import KeptProcess
from evoengine.service import answers, limits
from evoengine.service import app as application
from evoengine.service.limits import LANES
from tests.support.ledger_examples import a_figure, a_source, add_ranked, start_run
from tests.support.waiting import wait_for

SHA256 = a_source().sha256
PAGES = ("/", "/jobs/{number}", "/new", "/report", "/docs", "/style.css", "/openapi.json")
AT_ONCE = 45


@pytest.fixture
def known(served, ledger):
    """A server with a kernel."""

    def make(**settings):
        parts = served(**settings)
        parts.run = start_run(ledger)
        parts.trial = add_ranked(ledger, parts.run, a_figure(42.0, Kind.MEASURED))
        parts.ask = lambda path, **headers: ask(parts.url, path, headers)
        return parts

    return make


def ask(url, path, headers=(), method="GET"):
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=300)
    try:
        connection.request(method, path, headers={name.replace("_", "-"): v for name, v in dict(headers).items()})
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


@pytest.fixture
def drawing(monkeypatch):
    """Reports are drawn at once, or when `release` is set; counts them."""
    drawn, release = [], threading.Event()
    release.set()

    async def draw(starting, url, problem, gpu):
        drawn.append((problem, gpu))
        while not release.is_set():
            await asyncio.sleep(0.01)
        return gzip.compress(f"page {len(drawn)} of {problem} on {gpu}".encode())

    monkeypatch.setattr(answers, "_drawn", draw)
    return drawn, release


def test_a_report_is_drawn_by_a_process_of_its_own_as_the_command_draws_it(known, monkeypatch):
    """Which the keeper starts: a fork of the server would hold up every other request."""
    server = known()
    KeptProcess(answers.HELD, ["/bin/true"], environment={}).close()  # its keeper is up

    def fork(*_, **__):
        raise AssertionError("the server forks")

    monkeypatch.setattr(subprocess, "Popen", fork)
    monkeypatch.setattr(asyncio, "create_subprocess_exec", fork)
    status, headers, page = server.ask("/report")
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    _, packed, sent = server.ask("/report", accept_encoding="gzip")
    assert packed["content-encoding"] == "gzip" and gzip.decompress(sent) == page
    assert b"attention:b1,h2,s64,d32,fp16 on h100" in page and b"plotly" in page
    assert headers["content-security-policy"].startswith("sandbox allow-scripts")


def test_what_cannot_be_drawn_is_told_as_the_command_tells_it(known):
    server = known()
    assert server.ask("/report?gpu=h1000")[0] == 422
    status, _, said = server.ask("/report?gpu=a100")
    assert (status, b"the ledger holds no run for a100" in said) == (404, True), said


def test_a_report_is_drawn_once_for_each_state_of_the_ledger(known, ledger, drawing):
    server, (drawn, release) = known(), drawing
    release.clear()
    with ThreadPoolExecutor(AT_ONCE) as threads:
        asked = [threads.submit(server.ask, "/report?gpu=h100") for _ in range(AT_ONCE)]
        wait_for(lambda: drawn)
        assert server.ask("/livez")[0] == server.ask("/readyz")[0] == server.ask("/v1/best")[0] == 200
        release.set()
        answers = [each.result() for each in asked]
    assert len(drawn) == 1 and {(status, page) for status, _, page in answers} == {(200, b"page 1 of None on h100")}
    (tag,) = {headers["etag"] for _, headers, _ in answers}
    assert server.ask("/report?gpu=h100", if_none_match=tag)[0] == 304
    assert server.ask("/report?gpu=h100", if_none_match="*")[0] == 304
    add_ranked(ledger, server.run, a_figure(50.0, Kind.MEASURED), name="faster")
    status, headers, page = server.ask("/report?gpu=h100", if_none_match=tag)
    assert (status, page, headers["etag"] != tag) == (200, b"page 2 of None on h100", True)


def test_few_reports_are_drawn_at_once_and_the_others_are_told_when_to_come_again(known, drawing):
    server, (drawn, release) = known(), drawing
    room = answers.AT_ONCE + answers.WAITING
    release.clear()
    with ThreadPoolExecutor(AT_ONCE) as threads:
        asked = [threads.submit(server.ask, f"/report?problem=gemm:m{n},n64,k64,fp16") for n in range(64, 64 + AT_ONCE)]
        wait_for(lambda: sum(each.done() for each in asked) == AT_ONCE - room)
        refused = [each.result() for each in asked if each.done()]
        assert {(status, headers["retry-after"]) for status, headers, _ in refused} == {(503, "10")}
        assert server.ask("/readyz")[0] == 200
        release.set()
    assert sorted(each.result()[0] for each in asked) == [200] * room + [503] * (AT_ONCE - room)
    assert len(drawn) == room


@pytest.mark.parametrize("path", [f"/v1/kernels/{SHA256}/source", "/jobs/1", "/v1/jobs"])
def test_requests_of_a_kind_that_all_stand_still_leave_room_for_the_others(known, monkeypatch, path):
    server, stuck, release = known(max_connections=1000), [], threading.Event()
    server.client.submit(device="recorded:test.json")

    def stand_still(*args, **kwargs):
        stuck.append(args)
        release.wait()
        raise RuntimeError("it goes on now")

    for part, name in (
        (server.state.ledger, "candidate"),
        (server.state.jobs, "find"),
        (server.state.jobs, "newest"),
    ):
        monkeypatch.setattr(part, name, stand_still)
    at_once, waiting = LANES[{"/v1/k": "results", "/jobs": "pages", "/v1/j": "jobs"}[path[:5]]]
    try:
        with ThreadPoolExecutor(at_once + waiting + 5) as threads:
            asked = [threads.submit(server.ask, path) for _ in range(at_once + waiting + 5)]
            wait_for(lambda: len(stuck) == at_once)
            wait_for(lambda: sum(each.done() for each in asked) == 5)
            assert {each.result()[0] for each in asked if each.done()} == {503}
            for healthy in ("/livez", "/readyz", "/v1/best", "/v1/problems" if "kernels" not in path else "/metrics"):
                assert server.ask(healthy)[0] == 200, healthy
            release.set()
    finally:
        release.set()
    assert len(stuck) == at_once + waiting


def connect(url) -> socket.socket:
    parts = urlsplit(url)
    return socket.create_connection((parts.hostname, parts.port), timeout=300)


def answer_on(connection) -> bytes:
    """All that comes until the server closes."""
    found = b""
    while some := connection.recv(1 << 16):
        found += some
    return found


HALF = b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\n"


@pytest.mark.parametrize("sent", [b"", b"GET /li", HALF])
def test_headers_that_do_not_come_end_the_connection(served, monkeypatch, sent):
    monkeypatch.setattr(limits, "HEADER_SECONDS", 0.2)
    with connect(served().url) as slow:
        slow.sendall(sent)
        assert b"408" in answer_on(slow).partition(b"\r\n")[0]


def test_nor_do_those_of_a_later_request_on_it(served, monkeypatch):
    monkeypatch.setattr(limits, "HEADER_SECONDS", 0.2)
    with connect(served().url) as slow:
        slow.sendall(HALF + b"\r\n")
        assert b"200 OK" in slow.recv(1 << 16)
        slow.sendall(HALF)
        assert b"408 Request Timeout" in answer_on(slow)


def test_headers_without_an_end_are_refused(served):
    with connect(served().url) as endless:
        endless.sendall(HALF + b"X: " + b"x" * limits.HEADER_BYTES)
        assert b"431" in answer_on(endless).partition(b"\r\n")[0]


def test_a_body_that_does_not_come_ends_the_connection(served, monkeypatch):
    monkeypatch.setattr(limits, "BODY_SECONDS", 0.2)
    with connect(served().url) as slow:
        slow.sendall(b"POST /v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\n{")
        answer = answer_on(slow)
    assert b"408 Request Timeout" in answer and b"the body of the request did not arrive within 0.2 s" in answer


@pytest.mark.parametrize("sent", [b"", HALF])
def test_half_open_connections_keep_nobody_out(served, sent):
    server = served(max_connections=50)
    with ExitStack() as open_ones:
        slow = []
        for _ in range(300):
            slow.append(open_ones.enter_context(connect(server.url)))
            slow[-1].sendall(sent)
        for path in ("/livez", "/readyz"):
            assert ask(server.url, path)[0] == 200
        closed = sum(is_closed(each) for each in slow)
    assert closed >= 250


def is_closed(connection) -> bool:
    connection.setblocking(False)
    try:
        return not connection.recv(1)
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def test_requests_under_way_are_limited_for_each_address(served):
    server = served(max_connections=3)
    job = server.client.submit(device="recorded:test.json")
    server.client.close()
    with ExitStack() as open_ones:
        for _ in range(3):
            stream = open_ones.enter_context(connect(server.url))
            stream.sendall(f"GET /v1/jobs/{job.id}/events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
            assert b"200 OK" in stream.recv(1 << 16)
        with connect(server.url) as fourth:
            answer = answer_on(fourth)
    assert b"503 Service Unavailable" in answer and b"retry-after: 10" in answer.lower()


def test_behind_a_trusted_proxy_the_forwarded_address_is_counted(service, monkeypatch):
    parts = service(max_connections=2, trusted_proxy="10.0.0.0/8")
    under_way, release = [], threading.Event()

    def stand_still(*args):
        under_way.append(args)
        release.wait()
        return {}

    monkeypatch.setattr(application.Jobs, "counts", stand_still)
    parts.http._transport.client = ("10.0.0.1", 1)

    def ready(forwarded):
        return parts.http.get("/readyz", headers={"X-Forwarded-For": forwarded}).status_code

    with ThreadPoolExecutor(3) as threads:
        asked = [threads.submit(ready, "192.0.2.1") for _ in range(2)]
        wait_for(lambda: len(under_way) == 2)
        assert ready("192.0.2.1") == ready("203.0.113.9, 192.0.2.1, 10.9.9.9") == 503
        other = threads.submit(ready, "192.0.2.1, 198.51.100.7")  # the first of them anybody can write
        wait_for(lambda: len(under_way) == 3)
        release.set()
        assert [each.result() for each in (*asked, other)] == [200] * 3
    assert ready("192.0.2.1") == 200


def test_of_who_is_no_trusted_proxy_the_header_counts_nothing(service):
    parts = service(max_connections=1, trusted_proxy="10.0.0.1")
    assert not parts.state.settings.trusts("10.0.0.2") and not parts.state.settings.trusts("testclient")
    assert limits.ForwardedLimit(None, parts.state.settings)._forwarded(
        {"type": "http", "client": ("10.0.0.2", 1), "headers": [(b"x-forwarded-for", b"192.0.2.1")]}
    ) is None  # fmt: skip


def paths_of(app) -> list[str]:
    described = app.openapi()["paths"]
    return [*(path for path in described if "get" in described[path]), *PAGES]


def test_head_is_answered_as_get_without_the_body(known, drawing):
    server = known()
    job = server.client.submit(device="recorded:test.json")
    server.state.jobs.cancel(job.id)
    paths = paths_of(server.app)
    assert len(paths) > 15
    for path in paths:
        path = path.format(number=job.id, sha256=SHA256, key="none")
        status, headers, _ = ask(server.url, path)
        of_head, headers_of_head, body = ask(server.url, path, method="HEAD")
        assert (of_head, body) == (status, b""), path
        volatile = {"date", "content-length"} if path in ("/metrics", f"/v1/kernels/{SHA256}/bundle") else {"date"}
        assert {n: v for n, v in headers.items() if n not in volatile} == {
            n: v for n, v in headers_of_head.items() if n not in volatile
        }, path


def test_head_of_a_stream_ends(served):
    server = served()
    job = server.client.submit(device="recorded:test.json")
    assert ask(server.url, f"/v1/jobs/{job.id}/events", method="HEAD")[0] == 200


def test_a_star_in_if_none_match_is_any_answer_and_keeps_what_is_stored(known):
    server = known()
    assert server.ask("/v1/best", if_none_match="*")[0] == 304
    put = {"content": b'{"a": 1}', "headers": {"If-None-Match": "*"}}
    http_client = server.client._http
    assert http_client.put("/v1/cache/key", **put).status_code == 204
    again = http_client.put("/v1/cache/key", **put)
    assert (again.status_code, again.json()["detail"]) == (412, "an entry with the key key already exists")
