"""What the OpenAPI description promises, tried by schemathesis with inputs that nobody wrote down."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ledger_examples import a_figure, add_ranked, start_run

SCHEMATHESIS = shutil.which("schemathesis") or shutil.which("schemathesis", path=str(Path(sys.executable).parent))
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


@pytest.mark.exhaustive
@pytest.mark.skipif(SCHEMATHESIS is None, reason="pip install evoengine[interop]")
@pytest.mark.parametrize("scope", ["admin", None])
def test_no_request_meets_a_fault_of_the_server_or_an_answer_that_is_not_described(
    served, ledger, scope, tmp_path, monkeypatch
):
    monkeypatch.setattr("evoengine.service.api._rests", lambda job: True)  # nobody runs them: a wait is a minute
    add_ranked(ledger, start_run(ledger), a_figure(42.0))
    parts = served(require_tokens=True, max_streams=1000)
    token = parts.state.tokens.new("fuzz", scope, None) if scope else "evo_wrong"
    command = [SCHEMATHESIS, "run", f"{parts.url}/openapi.json", "--checks", CHECKS, "--max-examples", "10"]
    command += [
        "--header",
        f"Authorization: Bearer {token}",
        "--seed",
        "1",
        "--request-timeout",
        "60",
        "--workers",
        "1",
    ]
    command += ["--exclude-path-regex", "/events$"]  # a stream of a job that goes on has no end
    if scope is None:
        schema = tmp_path / "openapi.json"
        schema.write_text(json.dumps(parts.app.openapi()))
        command[2] = str(schema)
        command += ["--url", parts.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-5000:]
