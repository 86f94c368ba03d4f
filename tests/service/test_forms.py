"""The forms of the status page: a job is submitted and cancelled by whom the token allows it, and by no other site."""

from __future__ import annotations

import re
from html import unescape

import pytest

PAGE = {"Sec-Fetch-Site": "same-origin"}
GEMM = "gemm:m64,n64,k64,fp16"
FIELDS = {"problems": GEMM, "gpu": "h100", "device": "emulator", "trials": "7", "minutes": "", "priority": "3"}


def send(parts, path, fields=(), scope=None, **headers):
    given = headers or PAGE
    if scope:
        given = given | {"Authorization": f"Bearer {parts.by_scope[scope]}"}
    return parts.http.post(path, data=dict(fields), headers=given, follow_redirects=False)


@pytest.fixture
def guarded(service):
    parts = service(require_tokens=True)
    parts.by_scope = {name: parts.state.tokens.new(name, name, None) for name in ("read", "submit", "work", "admin")}
    return parts


def test_a_job_is_submitted_as_it_was_filled_in_and_is_shown(service):
    parts = service()
    sent = send(parts, "/new", FIELDS | {"problems": f" {GEMM}\r\ngemm:m64,n64,k128,fp16 "})
    assert (sent.status_code, sent.headers["location"]) == (303, "/jobs/1")
    request = parts.jobs.find(1).request
    assert request["problems"] == [GEMM, "gemm:m64,n64,k128,fp16"]
    assert (request["gpu"], request["device"], request["trials"]) == ("h100", "emulator", 7)
    assert (request["minutes"], request["priority"]) == (None, 3)
    assert GEMM in parts.http.get("/jobs/1").text


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"trials": "many"}, "trials: Input should be a valid integer"),
        ({"trials": "0"}, "trials is 0; it must be at least 1"),
        ({"gpu": "h1000"}, "did you mean h100"),
        ({"problems": "gemm:m0"}, "has m 0; it must be from 1"),
        ({"problems": ""}, "a job must name problems"),
        ({"nonsense": "x"}, "'nonsense' is not a field of this request"),
    ],
    ids=str,
)
def test_what_cannot_be_meant_is_said_on_the_form_which_keeps_what_was_filled_in(service, changed, said):
    parts = service()
    answer = send(parts, "/new", FIELDS | {"priority": "42"} | changed)
    [told] = re.findall('<p class="lost">(.*)</p>', answer.text)
    assert answer.status_code == 422 and said in unescape(told)
    assert 'value="42"' in answer.text and "<option selected>emulator" in answer.text
    assert parts.jobs.newest() == []


def test_a_form_shows_what_was_sent_as_text(service):
    answer = send(service(), "/new", FIELDS | {"problems": "</textarea><script>alert(1)</script>"})
    assert "<script" not in answer.text and "&lt;script&gt;" in answer.text


def test_a_job_is_cancelled_once_and_stays_as_it_ended(service):
    parts = service()
    send(parts, "/new", FIELDS)
    assert "/jobs/1/cancel" in parts.http.get("/jobs/1").text
    for _ in range(2):
        sent = send(parts, "/jobs/1/cancel")
        assert (sent.status_code, sent.headers["location"]) == (303, "/jobs/1")
        assert parts.jobs.find(1).state == "cancelled"
    assert "/jobs/1/cancel" not in parts.http.get("/jobs/1").text
    assert send(parts, "/jobs/2/cancel").status_code == 404


def test_forms_are_shown_and_taken_by_scope(guarded):
    assert send(guarded, "/new", FIELDS, "read").status_code == 403
    assert send(guarded, "/new", FIELDS, "submit").status_code == 303
    mine = guarded.jobs.find(1).submitter
    assert [token.name for token in guarded.state.tokens.all() if token.id == mine] == ["submit"]
    for scope, new, own in (
        ("read", False, False),
        ("submit", True, True),
        ("work", True, False),
        ("admin", True, True),
    ):
        headers = {"Authorization": f"Bearer {guarded.by_scope[scope]}"}
        assert ('href="/new"' in guarded.http.get("/", headers=headers).text) is new, scope
        assert ("/jobs/1/cancel" in guarded.http.get("/jobs/1", headers=headers).text) is own, scope
    for scope in ("read", "work"):
        assert send(guarded, "/jobs/1/cancel", (), scope).status_code == 403
    assert guarded.jobs.find(1).state == "queued"
    assert send(guarded, "/jobs/1/cancel", (), "admin").status_code == 303
    assert guarded.jobs.find(1).state == "cancelled"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Sec-Fetch-Site": "cross-site", "Origin": "http://127.0.0.1"}, 403),
        ({"Sec-Fetch-Site": "same-site", "Origin": "http://127.0.0.1"}, 403),
        ({"Origin": "https://other.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Accept": "text/html"}, 403),
        ({"Origin": "http://127.0.0.1"}, 303),
        ({"Sec-Fetch-Site": "same-origin", "Origin": "https://behind.a.proxy"}, 303),
    ],
    ids=str,
)
def test_a_form_of_another_site_changes_nothing(service, headers, status):
    """A browser on this machine needs no token, and elsewhere it adds the one it knows to what any page sends."""
    parts = service()
    answer = send(parts, "/new", FIELDS, **headers)
    assert answer.status_code == status
    assert len(parts.jobs.newest()) == (status == 303)
    parts.jobs.newest() or send(parts, "/new", FIELDS)
    assert send(parts, "/jobs/1/cancel", **headers).status_code == status
    assert parts.jobs.find(1).state == ("cancelled" if status == 303 else "queued")


def test_pages_let_a_browser_send_forms_here_alone_and_tell_where_it_comes_from(service):
    headers = service().http.get("/new").headers
    assert "form-action 'self'" in headers["content-security-policy"]
    assert headers["referrer-policy"] == "same-origin"  # with no-referrer, Origin is null
