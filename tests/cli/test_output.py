"""A command with its output in any state: closed, full, read by nobody, or in an encoding that holds few letters."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading

import pytest

from evoengine.cli import process as streams
from evoengine.cli.process import LETTERS, Stream, readable
from evoengine.cli.progress import print_summary, result_code
from evoengine.errors import UsageError
from evoengine.ledger.store import open_ledger
from evoengine.search.progress import Progress
from evoengine.text import command_line
from evoengine.tuning.search import SearchResult


def call(arguments: str, **env: str) -> subprocess.CompletedProcess[bytes]:
    """`evoengine ARGUMENTS…` by the shell, redirections included."""
    command = f"{sys.executable} -m evoengine {arguments}"
    return subprocess.run(["bash", "-c", command], capture_output=True, env=os.environ | env)


@pytest.mark.parametrize(
    ("redirected", "code", "says"),
    [
        (">/dev/full", 3, b"could not be written to stdout: No space left on device"),
        (">&-", 3, b"could not be written to stdout: Bad file descriptor"),
        ("<&- 2>&-", 0, b""),
        (">&- 2>&- <&-", 3, b""),
    ],
)
def test_output_that_cannot_be_written_is_said_and_is_no_success(redirected, code, says):
    done = call(f"problems {redirected}")
    assert done.returncode == code
    assert says in done.stderr and b"Traceback" not in done.stderr and done.stderr.count(b"\n") == bool(says)


def test_messages_that_cannot_be_written_are_no_success(tmp_path):
    assert call(f"new {tmp_path}/mine 2>/dev/full").returncode == 3
    assert (tmp_path / "mine" / "problem.json").is_file()  # what was asked for is done all the same


@pytest.mark.parametrize("env", [{"PYTHONIOENCODING": "ascii"}, {"PYTHONIOENCODING": "latin-1"}, "C"])
def test_letters_that_an_encoding_does_not_have_are_written_readably(env):
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": ""}
    done = call("problems", **(plain if env == "C" else env))
    assert done.returncode == 0 and done.stderr == b""
    assert b"attention:b...,h...,s...,d...[,dv...],fp16|bf16[,causal]" in done.stdout


def test_every_letter_of_the_programs_own_texts_is_one_that_ascii_replaces():
    texts = "µ·–…→×²√✓✗ρ"
    assert texts.isascii() is False and set(texts) <= LETTERS.keys()
    assert all(replacement.isascii() for replacement in LETTERS.values())


def test_what_no_encoding_holds_is_escaped():
    written = io.BytesIO()
    text = io.TextIOWrapper(written, "utf-8", errors="evoengine.readable")
    streams.codecs.register_error("evoengine.readable", readable)
    text.write(os.fsdecode(b"caf\xe9") + " \ud800")
    text.flush()
    assert written.getvalue() == rb"caf\xe9 \ud800"


def test_a_ledger_whose_name_is_no_text_is_refused_in_a_sentence(tmp_path):
    named = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.db")
    for create in (True, False):
        with pytest.raises(UsageError, match="a name that is not text in this locale; name another file"):
            open_ledger(named, create=create)
    assert list(tmp_path.iterdir()) == []


def test_a_run_may_be_called_with_bytes_that_are_no_text():
    assert command_line(["search", os.fsdecode(b"caf\xe9"), "µ"]) == r"search caf\xe9 µ"


# ── a reader that has gone ──────────────────────────────────────────────────────────────────────────────────────────


def break_stdout(monkeypatch) -> Stream:
    """Makes stdout a pipe that nobody reads. No fixture: pytest's own stdout would take its place before the test."""
    reading, writing = os.pipe()
    os.close(reading)
    raw = Stream(writing, "w")
    text = io.TextIOWrapper(io.BufferedWriter(raw), "utf-8")
    monkeypatch.setattr(streams, "_streams", {1: (text, raw)})
    monkeypatch.setattr(sys, "stdout", text)
    return raw


def test_a_write_into_a_broken_pipe_raises_nothing_and_is_known(monkeypatch):
    broken = break_stdout(monkeypatch)
    print("a line", flush=True)
    print("another", flush=True)
    assert list(streams.unwritten()) == ["stdout"] and streams.reader_exited(broken.failure)


def test_a_search_whose_summary_nobody_reads_says_where_it_is_and_is_no_success(monkeypatch):
    break_stdout(monkeypatch)
    said: list[str] = []
    result = SearchResult(1, Progress(1), (), invalid_proposals=0, repeated_proposals=0, missed={})
    assert print_summary(result, True, "my evo.db", [], said.append) == 1  # nothing was found, which is worse
    assert result_code(0, "evoengine best", said.append) == 3
    assert said[-1] == "the reader of stdout has exited; the result is in the ledger: evoengine best shows it"


def test_a_search_whose_summary_is_read_is_a_success(monkeypatch):
    monkeypatch.setattr(streams, "_streams", {})
    assert result_code(0, "evoengine best", print) == 0


def test_a_slow_reader_of_a_non_blocking_pipe_gets_it_all():
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    raw, got = Stream(writing, "w"), bytearray()

    def read() -> None:
        while data := os.read(reading, 1 << 16):
            got.extend(data)

    reader = threading.Thread(target=read)
    reader.start()
    with io.BufferedWriter(raw) as buffered:
        buffered.write(b"x" * (1 << 20))
    reader.join()
    os.close(reading)
    assert len(got) == 1 << 20 and raw.failure is None


# ── Ctrl-C ──────────────────────────────────────────────────────────────────────────────────────────────────────────

AT = """import sys
class Interrupting:
    def find_spec(self, name, path, target=None):
        if name == "{0}": raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupting())
"""


@pytest.mark.parametrize("module", ["click", "evoengine.cli.machine", "rich.console", "evoengine.workloads.gemm"])
def test_ctrl_c_during_an_import_is_130_without_a_traceback(module):
    code = AT.format(module)
    done = subprocess.run(
        [sys.executable, "-c", code + "from evoengine.__main__ import main; main()", "problems"],
        capture_output=True,
    )
    assert (done.returncode, b"Traceback" in done.stderr) == (130, False), done.stderr


def test_ctrl_c_in_a_finalizer_is_not_reported_and_lost():
    code = """
from evoengine.cli import machine, main as door
import evoengine.__main__ as program
class Finalized:
    def __del__(self): raise KeyboardInterrupt
def interrupted():
    Finalized()
    for _ in range(10**7): pass
    return 0
door.main = interrupted
program.main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True)
    assert (done.returncode, done.stderr) == (130, b"")
