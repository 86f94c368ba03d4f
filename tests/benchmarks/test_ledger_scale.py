"""The ledger that benchmarks/ledger_scale.py makes is one that every command reads."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks import ledger_scale as benchmark


@pytest.mark.exhaustive  # tests/ledger/test_scale.py shows what it measures
def test_it_measures_real_commands_on_a_ledger_of_that_size(tmp_path, monkeypatch, capsys):
    arguments = [
        "--trials",
        "60",
        "--db",
        str(tmp_path / "made.db"),
        "--only",
        "runs",
        "--only",
        "history --json",
        "--json",
    ]
    monkeypatch.setattr(sys, "argv", ["ledger_scale.py", *arguments])
    benchmark.main()
    told = json.loads(capsys.readouterr().out)
    assert told["trials"] == 60 and told["bytes"] > 60 * benchmark.PACKED_SOURCE_BYTES
    assert [c["code"] for c in told["commands"].values()] == [0, 0]
    assert told["commands"]["runs"]["lines"] == 1 + benchmark.RUNS
    assert all(c["peak_mb"] > 20 and c["seconds"] > 0.1 for c in told["commands"].values())
