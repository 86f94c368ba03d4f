"""Files of others, with one value replaced by something that nobody would write in earnest, through every command.

What holds for each: a command ends with the exit code that is stated here, without a traceback and without a file
outside its folder; a file that is refused leaves no ledger; and whatever a ledger took in, every later command works.
"""

from __future__ import annotations

import gzip
import itertools
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from evoengine.cli.main import evoengine
from evoengine.errors import EvoengineError, UsageError
from evoengine.formats.folder import write_folder
from evoengine.formats.importers import make_folder
from evoengine.gpu import find_gpu
from evoengine.gpu_file import read_gpu_file
from evoengine.ledger.store import open_ledger
from evoengine.publish.t4 import to_t4
from evoengine.search.targets import spaces_of, stored_target
from evoengine.space.space import load_space
from evoengine.tuning.setup import make_target
from tests.formats.test_flashinfer_trace import DECODE, GEMM, RMS_NORM
from tests.formats.test_tuned_kernels import ADD, T1
from tests.publish.test_t4 import whole
from tests.support.exhaustive import more
from tests.support.mutations import mutations
from tests.support.recorded import cache
from tests.test_gpu_file import BOARD

REFUSED, OK, NOTHING = 2, 0, 1
TAKEN = 2
"""of the mutated files that are not faults, so many go all the way"""


def own() -> dict[str, Any]:
    return json.loads(json.dumps(to_t4(whole()), allow_nan=False))


def foreign() -> dict[str, Any]:
    """As another tuner writes T4."""
    data = own()
    for part in (data["metadata"], *data["results"]):
        del part["evoengine"]
    data["results"] = [r for r in data["results"] if r["objectives"] == ["time"]]
    return data


def kernel_tuner() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        data = json.loads(cache(Path(folder, "cache.json")).read_text())
    data["cache"] = dict(list(data["cache"].items())[:2])
    return data


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder of the commands, some way inside the one that is watched."""
    inside = tmp_path / "a" / "b" / "c"
    inside.mkdir(parents=True)
    (tmp_path / "tmp").mkdir()
    monkeypatch.chdir(inside)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    return inside


def outside(folder: Path) -> set[Path]:
    return {path for path in folder.parents[2].rglob("*") if path.is_file() and folder not in path.parents}


def call(*arguments: object) -> tuple[int, str]:
    """The exit code, and what a person reads; any exception that is not a refusal is a traceback, and fails."""
    done = CliRunner().invoke(evoengine, list(map(str, arguments)))
    error = done.exception
    if isinstance(error, EvoengineError):
        assert "\n" not in str(error) and len(str(error)) < 1500, error
        return error.exit_code, str(error)
    assert error is None or isinstance(error, SystemExit), (arguments, error)
    return done.exit_code, done.output


def written(folder: Path, data: Any) -> Path:
    file = folder / "run.json"
    file.write_text(json.dumps(data))
    return file


FEW = [(own, 10, 1), (foreign, 5, 1), (kernel_tuner, 5, 1)]
"""what makes a file, how many mutations of it are tried, and how many ways to show a trial are tried on each"""
MANY = [(own, 300, 4), (foreign, 150, 4), (kernel_tuner, 150, 4)]


@pytest.mark.parametrize(("make", "most", "ways"), [*FEW, *more(MANY)])
def test_a_mutated_run_is_refused_whole_or_leaves_a_ledger_that_every_command_can_read(
    folder, monkeypatch, make, most, ways
):
    read = _reads_only(monkeypatch)
    taken = []
    for what, data in mutations(make(), seed=16, most=most):
        try:
            read(written(folder, data))
        except UsageError as error:
            assert "\n" not in str(error) and str(error).isprintable() and len(str(error)) < 1500, what
        except Exception as error:
            raise AssertionError(f"{what}: {error!r}") from error
        else:
            taken.append((what, data))
    assert most // 12 < len(taken) < most
    assert not list(folder.glob("*.db*"))
    for what, data in taken[:: max(1, len(taken) // TAKEN)]:
        assert call("import", written(folder, data), "--db", "evo.db")[0] == OK, what
        if make is not own:
            replay = ("search", "--device", "recorded:run.json", "--trials", 2, "--seed", 1, "--db", "replayed.db")
            assert call(*replay)[0] in (OK, NOTHING), what
    _every_command_reads(folder, ways)
    assert outside(folder) == set()


def _reads_only(monkeypatch):
    from evoengine.cli import transfer

    def read(file: Path) -> None:
        found = transfer._own(file) or transfer._recorded(file, lambda line: None)
        list(found[0].candidates)

    return read


SHOWN = ([], ["--json"], ["--lineage"], ["--source"])


def _every_command_reads(folder: Path, ways: int) -> None:
    """Each trial is shown in so many of the ways in turn."""
    with open_ledger("evo.db", create=False) as ledger:
        runs, known = ledger.runs(), ledger.candidates()
        for run in runs:
            try:
                target = stored_target(ledger, run.problem, find_gpu(run.gpu))
                spaces_of(ledger, [c for c in known if c.run == run.id], target)
            except UsageError:
                pass  # of a problem, a GPU or a space that is none; what must not be is a file
    assert all(run.imported_from for run in runs) and all(c.imported_from for c in known)
    for as_json in ([], ["--json"]):
        assert call("history", *as_json, "--db", "evo.db")[0] == OK
        assert call("best", *as_json, "--db", "evo.db")[0] in (OK, NOTHING)
        assert call("report", *as_json, "--db", "evo.db")[0] in (OK, NOTHING)
    ways = max(ways, -(-len(SHOWN) // len(known)))  # few trials are shown in more of them
    in_turn = itertools.cycle(SHOWN)
    for candidate in known[:: max(1, len(known) // 20)]:
        for option in itertools.islice(in_turn, ways):
            assert call("show", candidate.trial, *option, "--db", "evo.db")[0] in (OK, NOTHING)
    for run in runs[::4]:
        assert call("export", "again.json", "--run", run.id, "--db", "evo.db")[0] == OK
        assert call("import", "again.json", "--db", "again.db")[0] == OK


# ── what is wrong with a text as a whole ────────────────────────────────────────────────────────────────────────────


LIMIT = 2 << 20


def bomb() -> bytes:
    """A kilobyte that unpacks to more than a thousand; the limit is lowered for it, so as to unpack no gibibyte."""
    return gzip.compress(b"{" + b" " * LIMIT)


TEXTS = {
    "a gzip bomb": (bomb, "more than 2 MiB unpacked"),
    "gzip damaged within": (lambda: gzip.compress(b"")[:10] + b"\xff" * 400, "damaged"),
    "brackets in thousands": (lambda: b'{"results": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", "nested"),
    "brackets in hundreds": (lambda: b'{"results": ' + b"[" * 100 + b"]" * 100 + b"}", "nested more than 64 deep"),
    "a key twice": (lambda: b'{"results": [], "results": [1]}', "'results' twice"),
    "a number of 5,000 digits": (lambda: b'{"results": [' + b"9" * 5000 + b"]}", "thousands of digits"),
    "half a surrogate pair": (lambda: b'{"results": ["\\ud800"]}', "surrogate"),
    "half a surrogate pair as a key": (lambda: b'{"results": [], "\\uDFFF": 1}', "surrogate"),
    "U+0000": (lambda: b'{"results": ["a\\u0000b"]}', "U+0000"),
    "a list beyond all measure": (lambda: b'{"results": [' + b"0," * 20_000_000 + b"0]}", "20,000,000 values"),
    "no UTF-8": (lambda: b'{"results": ["\xff"]}', "plain or gzipped"),
    "nothing": (lambda: b"", "must be a JSON object"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_that_would_fail_later_is_refused_before_a_ledger_is_made(folder, monkeypatch, name):
    make, says = TEXTS[name]
    if make is bomb:
        monkeypatch.setattr("evoengine.search.recorded.LARGEST_FILE", LIMIT)
    (folder / "run.json").write_bytes(make())
    for command in (["import", "run.json"], ["search", "--device", "recorded:run.json"]):
        code, said = call(*command, "--db", "evo.db")
        assert (code, says in said) == (REFUSED, True), said
        assert not (folder / "evo.db").exists()


@pytest.mark.parametrize("file", ["pipe", "/dev/zero", ".", "gone"])
def test_what_is_no_file_is_refused_and_not_waited_for(folder, file):
    os.mkfifo(folder / "pipe")
    kernel = ["new", "own", "--from", f"t1:{file}"]
    for command in (["import", file], ["search", "--device", f"recorded:{file}"], kernel):
        assert call(*command)[0] == REFUSED


def test_a_file_whose_name_is_no_text_comes_in_under_one_that_is(folder):
    name = os.fsdecode(b"cache\xff\x1b[2J.json")
    cache(folder / name)
    assert call("import", name, "--db", "evo.db")[0] == OK
    with open_ledger("evo.db", create=False) as ledger:
        assert ledger.runs()[0].imported_from == "cache\\udcff\\x1b[2J.json"


# ── kernels of others ───────────────────────────────────────────────────────────────────────────────────────────────

FROM = {"gemm": ("trace", GEMM), "rmsnorm": ("trace", RMS_NORM), "decode": ("trace", DECODE), "t1": ("t1", T1)}


@pytest.mark.parametrize("name", FROM)
def test_a_mutated_description_of_a_kernel_makes_a_folder_or_is_refused(folder, name):
    kind, description = FROM[name]
    (folder / "add.cu").write_text(ADD)
    made = 0
    for n, (what, data) in enumerate(mutations(description, seed=16, most=150)):
        try:
            write_folder(make_folder("own", f"{kind}:{written(folder, data)}"), folder / f"own_{n}")
            made += 1
        except UsageError as error:
            assert "\n" not in str(error) and len(str(error)) < 1500, what
        except Exception as error:
            raise AssertionError(f"{what}: {error!r}") from error
    assert 10 < made < 150
    assert outside(folder) == set()


@pytest.fixture
def kernel(folder):
    assert call("new", "own")[0] == OK
    return folder / "own"


VERIFY = ("verify", "--kernel", "own", "--device", "emulator", "--config", "{}")
"""the empty configuration is in no space: what is not a fault is refused as well, and nothing is compiled"""


def bind(what: str, n: int) -> None:
    """Reads the folder and binds its space, as `search` and `verify` begin; every 50th time through the command."""
    try:
        target = make_target(None, find_gpu("h100"), Path("own"))
        load_space(Path("own", "space.toml"), target.problem, target.gpu)
    except UsageError as error:
        assert str(error).isprintable() and len(str(error)) < 2100, what
    except Exception as error:
        raise AssertionError(f"{what}: {error!r}") from error
    if n % 50 == 0:
        assert call(*VERIFY)[0] == REFUSED, what


def test_a_mutated_problem_is_refused_in_a_sentence(folder, kernel):
    file = kernel / "problem.json"
    for n, (what, data) in enumerate(mutations(json.loads(file.read_text()), seed=16, most=250)):
        file.write_text(json.dumps(data))
        bind(what, n)
    assert outside(folder) == set()


TOML = (
    '""', '"../../x"', "9223372036854775808", "-1", "0", "nan", "inf", "[]", "{}", "true", '"\\u0000"', "[[1]]",
    "1979-05-27", "9" * 5000, "[" * 2000 + "]" * 2000, f'"{"x" * 100_000}"', '"1 // 0"', '"9 ** 9 ** 9"', "[nan, 1]",
    '["a", 1]', '"' + "(" * 3000 + "1" + ")" * 3000 + '"', "",
)  # fmt: skip


def test_a_mutated_gpu_file_is_taken_or_refused_in_a_sentence(folder):
    file = folder / "board.toml"
    lines = BOARD.splitlines()
    for number, value in itertools.product(range(1, len(lines)), TOML):
        key = lines[number].partition(" = ")[0]
        file.write_text("\n".join([*lines[:number], f"{key} = {value}", *lines[number + 1 :]]))
        try:
            read_gpu_file(file)
        except UsageError as error:
            assert str(error).isprintable() and len(str(error)) < 2100, key
        except Exception as error:
            raise AssertionError(f"{key} = {value[:40]}: {error!r}") from error


def test_a_mutated_space_is_refused_in_a_sentence(folder, kernel):
    file = kernel / "space.toml"
    lines = file.read_text().splitlines()
    stated = [(n, line.partition(" = ")[0]) for n, line in enumerate(lines) if " = " in line and line[0] != "#"]
    for n, ((number, key), value) in enumerate(itertools.product(stated, TOML)):
        file.write_text("\n".join([*lines[:number], f"{key} = {value}", *lines[number + 1 :]]))
        bind(f"{key} = {value[:40]}", n)
    assert outside(folder) == set()
