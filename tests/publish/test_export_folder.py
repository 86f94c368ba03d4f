"""An exported folder is written whole or not at all, and never over what somebody else has there."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from evoengine.errors import UsageError
from evoengine.publish import folder as folders
from evoengine.publish.folder import CHECKSUMS, require_writable, write_folder

FIRST = {"kernel.json": json.dumps({"provenance": {"evoengine": "1"}}).encode(), "kernel.cu": b"// one"}
SECOND = FIRST | {"kernel.cu": b"// two", "trace.json": b"{}"}


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def test_a_new_folder_has_the_files_and_sums_that_sha256sum_takes(tmp_path):
    paths = write_folder(tmp_path / "new" / "out", FIRST)
    assert [p.name for p in paths] == [*FIRST, CHECKSUMS] and all(p.is_file() for p in paths)
    done = subprocess.run(["sha256sum", "-c", CHECKSUMS], cwd=tmp_path / "new" / "out", capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    (tmp_path / "new" / "out" / "kernel.cu").write_bytes(b"// other")
    done = subprocess.run(["sha256sum", "-c", CHECKSUMS], cwd=tmp_path / "new" / "out", capture_output=True, text=True)
    assert done.returncode == 1 and "kernel.cu: FAILED" in done.stdout


def test_an_empty_folder_and_an_earlier_export_are_replaced_whole(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    write_folder(out, SECOND)
    (out / "__pycache__").mkdir()  # as an import of the loader leaves it
    write_folder(out, FIRST)
    assert contents(out).keys() == {*FIRST, CHECKSUMS} and (out / "kernel.cu").read_bytes() == b"// one"
    assert os.listdir(tmp_path) == ["out"]


def test_a_folder_is_replaced_too_where_the_system_exchanges_no_names(tmp_path, monkeypatch):
    out = tmp_path / "out"
    write_folder(out, SECOND)
    monkeypatch.setattr(folders.ctypes, "CDLL", lambda name, use_errno: object())
    write_folder(out, FIRST)
    assert contents(out).keys() == {*FIRST, CHECKSUMS}
    assert os.listdir(tmp_path) == ["out"]


def a_file_of_ones_own(out):
    (out / "notes.txt").write_text("mine")


def a_changed_file(out):
    (out / "kernel.cu").write_text("// mine")


def a_folder_within(out):
    (out / "data").mkdir()


def a_link(out):
    (out / "kernel.cu").unlink()
    (out / "kernel.cu").symlink_to(out / "kernel.json")


def no_sums(out):
    (out / CHECKSUMS).unlink()


def sums_of_another_thing(out):
    (out / "kernel.json").write_text("[]")


def sums_that_are_none(out):
    (out / CHECKSUMS).write_bytes(b"\xff\0")


@pytest.mark.parametrize(
    ("happened", "said"),
    [
        (a_file_of_ones_own, "it has 'notes.txt', which no export wrote"),
        (a_changed_file, "'kernel.cu' was changed since it was exported"),
        (a_folder_within, "it has 'data', which no export wrote"),
        (a_link, "it has 'kernel.cu', which no export wrote"),
        (no_sums, "which no export wrote"),
        (sums_of_another_thing, "which no export wrote"),
        (sums_that_are_none, "which no export wrote"),
    ],
)
def test_what_no_export_wrote_is_never_written_over(tmp_path, happened, said):
    out = tmp_path / "out"
    write_folder(out, FIRST)
    happened(out)
    before = sorted(p.name for p in out.iterdir()), (out / "kernel.cu").read_bytes()
    with pytest.raises(UsageError, match=f"cannot write to .*out: .*{said}.*; --export takes a folder that is new"):
        write_folder(out, SECOND)
    assert (sorted(p.name for p in out.iterdir()), (out / "kernel.cu").read_bytes()) == before
    assert os.listdir(tmp_path) == ["out"]


def test_a_folder_of_other_things_keeps_them(tmp_path):
    (tmp_path / "kernel.cu").write_text("// somebody's own")
    with pytest.raises(UsageError, match=r"it has 'kernel.cu', which no export wrote"):
        write_folder(tmp_path, FIRST)
    assert contents(tmp_path) == {"kernel.cu": b"// somebody's own"}


def test_a_place_that_nobody_may_write_to_is_refused_before_anything_is_made(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)  # the tests may run as root
    with pytest.raises(UsageError, match=f"cannot write to .*out: {tmp_path} may not be written to"):
        require_writable(tmp_path / "deep" / "out")
    assert not os.listdir(tmp_path)


def test_a_file_is_no_folder_and_the_current_folder_is_not_replaced(tmp_path, monkeypatch):
    (tmp_path / "taken").write_text("")
    with pytest.raises(UsageError, match="cannot write to .*taken: it is a file"):
        write_folder(tmp_path / "taken", FIRST)
    with pytest.raises(UsageError, match="cannot write to .*out: .*/taken is a file"):
        require_writable(tmp_path / "taken" / "deep" / "out")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(UsageError, match="it is the current folder, which would be replaced: name a folder within it"):
        write_folder(Path("."), FIRST)


def test_a_folder_behind_a_link_is_written_where_it_leads(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    write_folder(tmp_path / "link", FIRST)
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real" / "kernel.cu").is_file()


def test_what_fails_half_way_leaves_the_folder_as_it_was(tmp_path, monkeypatch):
    out = tmp_path / "out"
    write_folder(out, FIRST)
    before = contents(out)
    write_bytes, written = Path.write_bytes, []

    def full(path, data):
        written.append(path.name)
        if len(written) == 2:
            raise OSError(28, "No space left on device")
        return write_bytes(path, data)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(UsageError, match="No space left on device"):
        write_folder(out, SECOND)
    assert contents(out) == before and os.listdir(tmp_path) == ["out"]


KILLED_AT = """
import os, signal, sys
from pathlib import Path
from evoengine.publish.folder import write_folder
from tests.publish.test_export_folder import SECOND
def hook(event, given):
    if event == {event!r} and {name!r} in str(given):
        os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(hook)
write_folder(Path(sys.argv[1]), SECOND)
"""


# the names are those of files that are written, in the folder beside it
@pytest.mark.parametrize(("event", "name"), [("open", "part-"), ("os.rename", "part-")])
@pytest.mark.parametrize("before", [None, FIRST])
def test_a_killed_export_leaves_the_old_folder_or_none(tmp_path, event, name, before):
    out = tmp_path / "out"
    if before:
        write_folder(out, before)
    old = contents(out) if before else None
    script = KILLED_AT.format(event=event, name=name)
    done = subprocess.run([sys.executable, "-c", script, str(out)], capture_output=True)
    assert done.returncode == -signal.SIGKILL
    assert (contents(out) if out.exists() else None) == old
    write_folder(out, SECOND)
    assert contents(out).keys() == {*SECOND, CHECKSUMS}


def test_what_a_killed_export_left_is_removed_by_a_later_one_of_that_name(tmp_path):
    for name, age in ((".out.part-old", 7200), (".out.part-new", 0), (".other.part-old", 7200)):
        (tmp_path / name).mkdir()
        moment = (tmp_path / name).stat().st_mtime - age
        os.utime(tmp_path / name, (moment, moment))
    write_folder(tmp_path / "out", FIRST)
    assert sorted(os.listdir(tmp_path)) == [".other.part-old", ".out.part-new", "out"]


def test_a_copy_of_an_export_is_one(tmp_path):
    write_folder(tmp_path / "out", FIRST)
    shutil.copytree(tmp_path / "out", tmp_path / "copy")
    write_folder(tmp_path / "copy", SECOND)
    assert (tmp_path / "copy" / "kernel.cu").read_bytes() == b"// two"
