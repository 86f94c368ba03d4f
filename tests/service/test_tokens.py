"""Who may do what: every endpoint with no token, a wrong one, an expired one and one of too small a scope."""

from __future__ import annotations

import base64
import re
from datetime import timedelta

import pytest
from sqlalchemy import text

from evoengine.cli.service import SCOPES as OFFERED
from evoengine.errors import UsageError
from evoengine.ledger.tables import Base
from evoengine.service import access as tokens_module
from evoengine.service.access import GRANTS, SCOPES, Tokens, digest
from evoengine.service.settings import Settings
from evoengine.service.tables import TokenRow

OPEN = {"/livez", "/readyz"}
"""what says no more than that the server is up"""
PAGES = {"/", "/report", "/jobs/{number}", "/docs", "/openapi.json", "/nowhere"}
FORMS = (("GET", "/new"), ("POST", "/new"), ("POST", "/jobs/{number}/cancel"))
JSON = {"Content-Type": "application/json"}
NEEDED = {"POST": "submit", "DELETE": "submit", "PUT": "work"}
GEMM = {"problems": ["gemm:m64,n64,k64,fp16"], "gpu": "h100"}


def endpoints(app) -> list[tuple[str, str]]:
    """Method and path of everything that the service has, described or not."""
    described = [(m.upper(), path) for path, methods in app.openapi()["paths"].items() for m in methods]
    return described + [("GET", path) for path in PAGES] + list(FORMS)


def concrete(path: str) -> str:
    return re.sub(r"{\w+}", lambda found: "0" * 64 if found[0] == "{sha256}" else "1", path)


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def contents(ledger) -> dict[str, list]:
    """All rows but for when a token was used."""
    with ledger.database.reading() as session:
        tables = [t for t in Base.metadata.sorted_tables if t.name != "tokens"]
        return {table.name: session.execute(table.select()).all() for table in tables}


@pytest.fixture
def guarded(service):
    """A service that asks for tokens, with a job in it, and a token per scope."""
    parts = service(require_tokens=True)
    parts.by_scope = {scope: parts.state.tokens.new(scope, scope, None) for scope in SCOPES}
    made = parts.http.post("/v1/jobs", json=GEMM, headers=bearer(parts.by_scope["submit"]))
    assert made.status_code == 202
    return parts


def test_every_endpoint_is_either_open_to_all_or_asks_for_a_token(guarded, ledger):
    before = contents(ledger)
    asked = 0
    for method, path in endpoints(guarded.app):
        for headers in ({}, bearer("evo_wrong"), bearer(""), {"Authorization": "Basic eDp5"}, {"Authorization": "x"}):
            body = {"json": GEMM} if asked % 2 else {"content": b"{no JSON", "headers": JSON | headers}
            answer = guarded.http.request(method, concrete(path), **{"headers": headers} | body)
            if path in OPEN:
                assert answer.status_code == 200
                continue
            asked += 1
            assert (answer.status_code, method, path) == (401, method, path)
            assert answer.headers["content-type"] == "application/problem+json"
            assert answer.headers["www-authenticate"] == "Bearer"
    assert asked > 80
    assert contents(ledger) == before


def test_the_command_offers_each_scope_of_the_service():
    assert sorted(OFFERED) == sorted(SCOPES)


def test_an_expired_token_and_one_of_a_smaller_scope_change_nothing(guarded, ledger):
    expired = guarded.state.tokens.new("old", "admin", 1)
    with ledger.database.writing() as session:
        row = session.query(TokenRow).filter_by(name="old").one()
        row.expires_at -= timedelta(days=2)
    before = contents(ledger)
    refused = 0
    for method, path in endpoints(guarded.app):
        if path in OPEN:
            continue
        answer = guarded.http.request(method, concrete(path), headers=bearer(expired), json=GEMM)
        assert (answer.status_code, "old has expired" in answer.json()["detail"]) == (401, True)
        needed = "submit" if (method, path) in FORMS else NEEDED.get(method, "read")
        needed = "propose" if path == "/v1/candidates" else needed
        for scope in (each for each in SCOPES if needed not in GRANTS[each]):
            answer = guarded.http.request(method, concrete(path), headers=bearer(guarded.by_scope[scope]), json=GEMM)
            assert (answer.status_code, f"needs {needed}" in answer.json()["detail"]) == (403, True)
            refused += 1
    # submit, retune, cancel, forms: read and propose; store: these and submit; candidates: all but propose and admin
    assert refused == 18
    assert contents(ledger) == before


def test_each_scope_may_do_what_is_its_own(guarded):
    def status(scope: str, method: str, path: str, **options: object) -> int:
        return guarded.http.request(method, path, headers=bearer(guarded.by_scope[scope]), **options).status_code

    assert status("read", "GET", "/v1/jobs") == 200
    assert status("submit", "POST", "/v1/jobs", json=GEMM) == 202
    assert status("work", "PUT", "/v1/cache/key", json={}) == 204
    assert status("work", "DELETE", "/v1/jobs/1") == 403  # another token's
    assert status("submit", "DELETE", "/v1/jobs/1") == 200
    assert status("admin", "DELETE", "/v1/jobs/2") == 200


def test_two_tokens_may_use_the_same_idempotency_key(guarded):
    def ask(scope: str) -> int:
        headers = bearer(guarded.by_scope[scope]) | {"Idempotency-Key": "k"}
        return guarded.http.post("/v1/jobs", json=GEMM, headers=headers).json()["id"]

    assert ask("submit") == ask("submit") != ask("work")


def test_a_browser_may_give_the_token_as_a_password(guarded):
    asked = guarded.http.get("/", headers={"Accept": "text/html"})
    assert (asked.status_code, asked.headers["www-authenticate"].split()[0]) == (401, "Basic")
    login = base64.b64encode(f"anybody:{guarded.by_scope['read']}".encode()).decode()
    assert guarded.http.get("/", headers={"Authorization": f"Basic {login}"}).status_code == 200


@pytest.mark.parametrize(
    "headers", [{"X-Forwarded-For": "10.0.0.1"}, {"Forwarded": "for=10.0.0.1"}, {"Host": "tuner.example:8765"}]
)
def test_on_loopback_only_programs_of_this_machine_need_no_token(service, headers):
    http = service().http
    assert http.get("/v1/jobs").status_code == 200
    assert http.get("/v1/jobs", headers=headers).status_code == 401


@pytest.mark.parametrize(
    ("host", "required"),
    [("127.0.0.1", False), ("localhost", False), ("::1", False), ("0.0.0.0", True), ("::", True), ("10.1.2.3", True)],
)
def test_any_other_address_asks_everybody(host, required):
    assert Settings(host=host).tokens_required is required
    assert Settings(host=host, require_tokens=True).tokens_required
    assert Settings(host=host, require_tokens=False).tokens_required is required


def test_a_token_is_kept_as_its_sha256_and_its_use_is_noted(ledger, tmp_path):
    tokens = Tokens(ledger)
    token = tokens.new("ci", "submit", 30)
    assert token.startswith("evo_") and len(token) == len("evo_") + 43
    with ledger.database.reading() as session:
        stored = [str(row) for row in session.execute(text("SELECT * FROM tokens"))]
    assert token not in "".join(stored) and digest(token) in stored[0]
    [before] = tokens.all()
    assert before.used_at is None and (before.expires_at - before.created_at).days == 30
    assert tokens.find(token).name == "ci"
    assert tokens.all()[0].used_at is not None
    assert tokens.find(f"{token}x") is None


def test_a_revoked_token_is_refused_and_its_successor_does_not_own_its_jobs(guarded, ledger, monkeypatch):
    monkeypatch.setattr(tokens_module, "KNOWN_SECONDS", 0.0)
    old = guarded.by_scope["submit"]
    Tokens(ledger).revoke("submit")
    assert guarded.http.get("/v1/jobs", headers=bearer(old)).status_code == 401
    new = Tokens(ledger).new("submit", "submit", None)
    assert guarded.http.delete("/v1/jobs/1", headers=bearer(new)).status_code == 403


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("ci", "write", None), "unknown scope 'write'"),
        (("a b", "read", None), "use 1 to 64 letters"),
        (("ci", "read", 0), "cannot expire after 0 days"),
        (("taken", "read", None), "there already is a token taken"),
    ],
)
def test_a_token_that_cannot_be_meant_is_not_made(ledger, arguments, said):
    Tokens(ledger).new("taken", "read", None)
    with pytest.raises(UsageError, match=said):
        Tokens(ledger).new(*arguments)
    assert [token.name for token in Tokens(ledger).all()] == ["taken"]


def test_revoking_what_is_not_there_names_what_is(ledger):
    Tokens(ledger).new("laptop", "read", None)
    with pytest.raises(UsageError, match="no token 'labtop'; there are laptop; did you mean laptop?"):
        Tokens(ledger).revoke("labtop")
