"""A password of a database URL is in no ledger, export, hint, log or message, wherever in the URL it stands."""

from __future__ import annotations

import json
import sqlite3
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from evoengine.cli import dashboard
from evoengine.cli.main import evoengine
from evoengine.errors import UsageError
from evoengine.ledger.database import display_url, parse_url
from evoengine.ledger.optuna import study
from evoengine.ledger.optuna import study as study_summary
from evoengine.paths import chosen_database
from evoengine.text import command_line, hide_passwords
from tests.support.recorded import cache
from tests.support.vouch import vouch_for_all

SECRETS = ("hunter2", "S3cr3t%21", "correct%40horse", "p4ss:w0rd", "s1a/sh", "tw0@ats", "ends-in@", "=equals&=", "1234")
URLS = (
    "postgresql://me:{}@host:5432/db", "postgresql+psycopg://me:{}@host/db?sslmode=require", "postgres://me:{}@host",
    "postgresql://:{}@/db", "postgresql://me:{}@[::1]:5432/db", "mysql://me:{}@host/db",
)  # fmt: skip
PARAMETERS = ("postgresql://me@host/db?password={}", "postgresql:///db?host=a&sslpassword={}&user=me")
PLAIN = (
    "sqlite:////a/b.db",
    "db/evoengine.db",
    "http://127.0.0.1:8080/dashboard",
    "postgresql://me@host:5432/db",
    "a@b",
)


def everywhere() -> list[tuple[str, str]]:
    of_login = [(url.format(secret), secret) for url in URLS for secret in SECRETS]
    plain = [secret for secret in SECRETS if "&" not in secret]
    return of_login + [(url.format(secret), secret) for url in PARAMETERS for secret in plain]


@pytest.mark.parametrize(("url", "secret"), everywhere())
def test_a_url_is_shown_without_its_password(url, secret):
    assert secret not in hide_passwords(f"cannot use {url} here").replace("5432", "")
    assert secret not in command_line(["evoengine", "best", f"--db={url}"]).replace("5432", "")
    try:
        assert secret not in display_url(parse_url(url)).replace("5432", "")
    except UsageError as error:
        assert secret not in str(error).replace("5432", "")


def test_a_password_with_spaces_is_hidden_in_a_command_line():
    assert command_line(["evoengine", "--db", "postgresql://me:two words@host/db"]) == (
        "evoengine --db postgresql://me:***@host/db"
    )


def test_a_url_whose_host_was_forgotten_hides_what_must_be_its_password():
    assert hide_passwords("postgresql://me:hunter2/db") == "postgresql://me:***"


@pytest.mark.parametrize("text", PLAIN)
def test_what_has_no_password_is_shown_as_it_is(text):
    assert hide_passwords(text) == text


@pytest.mark.parametrize("url", ["postgresql://me:pa@ss@host/db", "postgresql://me:pass@host:port/db"])
def test_a_url_that_would_be_cut_at_the_wrong_place_is_refused_with_the_remedy(url):
    with pytest.raises(UsageError, match="%40 for an @"):
        parse_url(url)


def test_an_sqlite_file_may_have_an_at_sign():
    assert parse_url("sqlite:////data/a@b/c@d.db").database == "/data/a@b/c@d.db"


SECRET = "hunter2"
SERVER = f"postgresql://me:{SECRET}@127.0.0.1:1/db"


@pytest.fixture
def command(monkeypatch):
    """Calls evoengine in this process, with its arguments where `sys.argv` has them; gives what a person sees."""

    def call(*arguments: object, code: int = 0) -> str:
        said = list(map(str, arguments))
        monkeypatch.setattr(sys, "argv", ["evoengine", *said])
        done = CliRunner().invoke(evoengine, said)
        assert done.exception is None or isinstance(done.exception, UsageError | SystemExit), done.exception
        assert (done.exit_code == 0) == (code == 0), done.output
        return done.output + str(done.exception)

    return call


@pytest.mark.parametrize("arguments", [("best",), ("history", "--json"), ("dashboard",), ("report",)])
@pytest.mark.parametrize("url", [SERVER, f"postgresql://me@127.0.0.1:1/db?password={SECRET}"])
def test_a_server_that_does_not_answer_is_named_without_the_password(command, arguments, url):
    said = command(*arguments, "--db", url, code=2)
    assert "***" in said and SECRET not in said


def test_a_ledger_keeps_the_command_without_the_password_and_so_does_an_export(command, tmp_path, monkeypatch):
    monkeypatch.setenv("EVOENGINE_DB", str(tmp_path / "evo.db"))
    file = cache(tmp_path / "test.json")
    monkeypatch.setattr(sys, "argv", ["evoengine", "import", "--db", SERVER])
    assert "imported" in CliRunner().invoke(evoengine, ["import", str(file)]).output
    with sqlite3.connect(tmp_path / "evo.db") as connection:
        [(kept,)] = connection.execute("SELECT command FROM runs").fetchall()
        assert "***@127.0.0.1" in kept
        connection.execute("UPDATE runs SET command = ?", (f"evoengine --db {SERVER}",))  # as older ones did
    vouch_for_all(str(tmp_path / "evo.db"))
    command("export", tmp_path / "run.json")
    assert SECRET not in (tmp_path / "run.json").read_text()
    assert json.loads((tmp_path / "run.json").read_text())["metadata"]["evoengine"]["command"].endswith(
        "127.0.0.1:1/db"
    )


def test_the_dashboard_is_started_in_this_process_and_its_line_has_no_password(command, monkeypatch):
    """No child has the URL as an argument, where `ps` shows it to everybody."""
    served = []
    monkeypatch.setattr("evoengine.ledger.store.open_ledger", lambda db, create: nullcontext(SimpleNamespace(url=db)))
    monkeypatch.setattr(study, "optuna_storage", lambda url: url)
    monkeypatch.setattr(study, "artifact_store", lambda url: None)
    monkeypatch.setattr(study_summary, "summarise_large_studies", lambda storage, ledger: [])
    monkeypatch.setattr("optuna_dashboard.wsgi", lambda storage, artifact_store: storage)
    serving = SimpleNamespace(serve_forever=lambda: None)

    def make_server(host, port, app, server_class):
        served.append(app)
        return nullcontext(serving)

    monkeypatch.setattr(dashboard, "make_server", make_server)
    monkeypatch.setattr("subprocess.Popen", lambda *a, **k: pytest.fail("a child was started"))
    said = command("dashboard", "--db", SERVER, "--port", 59327)
    assert served == [SERVER]
    assert "***" in said and SECRET not in said


# ── where a ledger is named ─────────────────────────────────────────────────────────────────────────────────────────


def test_an_option_is_before_the_environment_and_that_before_the_default(monkeypatch, tmp_path):
    assert chosen_database(None).endswith("db/evoengine.db")
    (tmp_path / "url").write_text(f"{SERVER}\n")
    monkeypatch.setenv("EVOENGINE_DB_FILE", str(tmp_path / "url"))
    assert chosen_database(None) == SERVER
    assert chosen_database("other.db") == "other.db"
    monkeypatch.delenv("EVOENGINE_DB_FILE")
    monkeypatch.setenv("EVOENGINE_DB", "third.db")
    assert chosen_database(None) == "third.db"
    assert chosen_database("other.db") == "other.db"


def test_two_names_in_the_environment_are_refused(monkeypatch):
    monkeypatch.setenv("EVOENGINE_DB", SERVER)
    monkeypatch.setenv("EVOENGINE_DB_FILE", "/run/secrets/db")
    with pytest.raises(UsageError, match="both EVOENGINE_DB and EVOENGINE_DB_FILE") as error:
        chosen_database(None)
    assert SECRET not in str(error.value)


@pytest.mark.parametrize("content", [b"", b"\n\n", b"a\nb\n", b"\xff\xfe", b"x" * 5000, None])
def test_a_file_that_holds_no_url_is_refused_and_not_quoted(monkeypatch, tmp_path, content):
    if content is not None:
        (tmp_path / "url").write_bytes(content)
    monkeypatch.setenv("EVOENGINE_DB_FILE", str(tmp_path / "url"))
    with pytest.raises(UsageError, match="EVOENGINE_DB_FILE names"):
        chosen_database(None)
