"""The benchmark that times a browser at a study's page: it times the drawing of all trials, and refuses no ledger."""

from __future__ import annotations

import re
import sys

import pytest

from benchmarks import dashboard
from evoengine.cli.main import evoengine as command
from tests.support.browser import needs_browser
from tests.support.recorded import cache


@needs_browser
@pytest.mark.exhaustive  # tests/cli/test_dashboard.py shows the page in a browser
def test_the_page_is_timed_until_every_trial_is_drawn(tmp_path, monkeypatch, capsys):
    db = str(tmp_path / "evo.db")
    file = cache(tmp_path / "test.json", paddings=20)
    command(["import", str(file), "--db", db], standalone_mode=False)
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["dashboard", "--db", db, "--times", "1"])
    dashboard.main()
    [row] = re.findall(r"([\d.]+) +│ +([\d.]+) +│ +([\d.]+) +│ +([\d,]+) +│ +([\d,]+)", capsys.readouterr().out)
    asked, there, drawn, points, bars = (float(cell.replace(",", "")) for cell in row)
    assert 0 < asked < there < drawn
    assert points == 220 and bars == 240  # 20 of 240 did not compile, and have no value


def test_a_ledger_that_is_not_there_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["dashboard", "--db", str(tmp_path / "none.db")])
    with pytest.raises(SystemExit, match="2"):
        dashboard.main()
    assert "there is no ledger" in capsys.readouterr().err or dashboard.BROWSER is None
