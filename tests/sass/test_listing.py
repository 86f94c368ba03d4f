"""A listing is made once for a machine and kept in the user's cache; what cannot be one is made again."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from evoengine.accuracy.compilers import InstalledNvrtc
from evoengine.errors import UsageError
from evoengine.sass import listing
from evoengine.sass.listing import disassemble, instruction_mix, instructions
from tests.support.machine_code import require_tools

TOOL = '#!/bin/sh\necho called >> {calls}\nif grep -q bad "$4"; then echo no such code >&2; exit 1; fi\ncat "$4"\n'


class Tool:
    """In place of nvdisasm: it prints the file that it is given, and refuses one that says `bad`."""

    def __init__(self, folder: Path, name: str) -> None:
        self.path, self._calls = folder / name, folder / f"{name}.calls"
        self.path.write_text(TOOL.format(calls=self._calls))
        self.path.chmod(0o755)

    @property
    def calls(self) -> int:
        return len(self._calls.read_text().splitlines()) if self._calls.exists() else 0


@pytest.fixture
def tool(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    first = Tool(tmp_path, "nvdisasm")
    monkeypatch.setattr(listing, "disassembler", lambda: str(first.path))
    return first


def kept(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "evoengine" / "listings").iterdir())


def test_a_listing_is_made_once(tool, tmp_path):
    assert [disassemble(b"one\n") for _ in range(3)] == ["one\n"] * 3
    assert tool.calls == 1
    assert len(kept(tmp_path)) == 1


def test_another_binary_has_a_listing_of_its_own(tool):
    assert [disassemble(b"one"), disassemble(b"two"), disassemble(b"one")] == ["one", "two", "one"]
    assert tool.calls == 2


def test_another_disassembler_is_asked_for_what_the_first_listed(tool, monkeypatch, tmp_path):
    second = Tool(tmp_path, "other")
    disassemble(b"one")
    monkeypatch.setattr(listing, "disassembler", lambda: str(second.path))
    disassemble(b"one")
    assert (tool.calls, second.calls) == (1, 1)


def test_the_same_path_with_another_tool_in_it_is_asked_again(tool):
    disassemble(b"one")
    tool.path.write_text(tool.path.read_text() + "echo more\n")
    assert disassemble(b"one") == "onemore\n"


def test_the_same_tool_in_another_environment_is_not_asked_again(tool, monkeypatch, tmp_path):
    disassemble(b"one")
    (tmp_path / "other").mkdir()
    copy = tool.path.rename(tmp_path / "other" / "nvdisasm")
    copy.touch()
    monkeypatch.setattr(listing, "disassembler", lambda: str(copy))
    assert disassemble(b"one") == "one" and tool.calls == 1


@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda data: b"", lambda data: b"x" + data])
def test_a_damaged_one_is_made_again(tool, tmp_path, damage):
    disassemble(b"one")
    (file,) = kept(tmp_path)
    file.write_bytes(damage(file.read_bytes()))
    assert [disassemble(b"one"), disassemble(b"one")] == ["one", "one"]
    assert tool.calls == 2


def test_what_the_tool_refuses_is_refused_each_time(tool):
    for _ in range(2):
        with pytest.raises(UsageError, match="nvdisasm cannot read the binary: no such code"):
            disassemble(b"bad")
    assert tool.calls == 2


def test_those_used_longest_ago_go_first(tool, tmp_path, monkeypatch):
    monkeypatch.setattr(listing, "KEPT", 8)
    for number in range(9):
        disassemble(b"%d" % number)
    assert len(kept(tmp_path)) == 7


def test_where_no_cache_can_be_made_each_is_made_again(tool, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert [disassemble(b"one"), disassemble(b"one")] == ["one", "one"]
    assert tool.calls == 2


def test_nor_does_one_that_cannot_be_kept_fail(tool, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(listing, "building", full)
    assert [disassemble(b"one"), disassemble(b"one")] == ["one", "one"]
    assert tool.calls == 2 and kept(tmp_path) == []


TWO_KERNELS = """
extern "C" __global__ void doubles(float* p) { p[threadIdx.x] *= 2; }
extern "C" __global__ void sums(float* p) { for (int i = 0; i < 100; i++) p[threadIdx.x] += p[i]; }
"""


def test_one_kernel_of_a_binary_is_listed_alone():
    require_tools()
    cubin = InstalledNvrtc().compile(TWO_KERNELS, "sm_86", ())
    alone = disassemble(cubin, "sums")
    assert ".text.doubles" not in alone
    assert instructions(alone, "sums") == instructions(disassemble(cubin), "sums")
    with pytest.raises(UsageError, match="the binary has no kernel products"):
        disassemble(cubin, "products")


def test_products_of_unlike_rates_are_counted_apart():
    lines = ("HMMA.16816.F32 R4, R8", "HMMA.1688.F32.TF32 R4, R8", "@P0 HMMA.SP.16832.F32 R4, R8", "FFMA.FTZ R1, R2")
    text = "\n".join(f"        /*{16 * n:04x}*/                   {line} ;" for n, line in enumerate(lines))
    assert instruction_mix(text) == {"FFMA": 1, "HMMA": 1, "HMMA.SP": 1, "HMMA.TF32": 1}


def test_a_listing_that_takes_too_long_is_a_sentence(tool, monkeypatch):
    tool.path.write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(listing, "SECONDS", 0.2)
    with pytest.raises(UsageError, match=r"nvdisasm took longer than 0\.2 s for a binary of 3 bytes"):
        disassemble(b"one")
