"""A GPU from a file: what is taken, and the one sentence that each fault gets."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace

import pytest

from evoengine.errors import UsageError
from evoengine.gpu import find_gpu, known_gpus
from evoengine.gpu_file import read_gpu_file, stored_fields

BOARD = """\
[board]
name = "NVIDIA A4500"
arch = "sm_86"
sms = 56
clock_ghz = 1.65
tensor_tflops = 94.6
fp32_tflops = 23.7
memory_gbs = 640
shared_per_block = 101376
shared_per_sm = 102400
registers_per_sm = 65536
threads_per_sm = 1536
blocks_per_sm = 16
"""


@pytest.fixture
def read(tmp_path):
    def given(text: str | bytes):
        path = tmp_path / "board.toml"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return read_gpu_file(path)

    return given


def test_a_board_is_read_as_one_of_evoengine_s_own_is(read):
    gpu = read(BOARD)
    assert gpu == replace(
        find_gpu("a10"), key="board", name="NVIDIA A4500", sms=56, clock_ghz=1.65, tensor_tflops=94.6,
        fp32_tflops=23.7, memory_gbs=640,
    )  # fmt: skip
    assert stored_fields(json.loads(json.dumps(asdict(gpu))), "the ledger") == gpu


@pytest.mark.parametrize("own", known_gpus().values(), ids=lambda gpu: gpu.key)
def test_every_board_of_ours_is_a_board_under_another_name(own):
    assert stored_fields({**asdict(own), "key": "copy"}, "a copy") == replace(own, key="copy")


def test_a_board_may_have_less_than_its_architecture_and_be_of_one_that_is_new(read):
    assert read(BOARD.replace("shared_per_block = 101376", "shared_per_block = 32768")).shared_per_block == 32768
    assert read(BOARD.replace("sm_86", "sm_110")).capability == 110


FAULTS = {
    "no table": ("", "must describe one GPU, as a table .NAME. of evoengine/gpus.toml does; it has 0 entries"),
    "two tables": (BOARD + BOARD.replace("[board]", "[other]"), "one GPU.*it has 'board', 'other'"),
    "no table but a value": ("board = 3", r"gives board as 3; it must be a table \[board\]"),
    "a list of tables": (BOARD.replace("[board]", "[[board]]"), "it must be a table"),
    "one of ours": (BOARD.replace("[board]", "[h100]"), "h100, which evoengine has already; give the board another"),
    "auto": (BOARD.replace("[board]", "[auto]"), "names its GPU 'auto'"),
    "a path": (BOARD.replace("[board]", '["../x"]'), "names its GPU '../x'; a name has up to 40 of a-z"),
    "an escape": (BOARD.replace("[board]", '["\\u001b[31m"]'), r"names its GPU '\\x1b\[31m'"),
    "capitals": (BOARD.replace("[board]", "[BOARD]"), "names its GPU 'BOARD'"),
    "a missing field": (BOARD.replace("sms = 56\n", ""), r"\[board\] does not give sms"),
    "a mistyped field": (BOARD.replace("sms =", "sm ="), r"which is not a field of a GPU; did you mean sms\?"),
    "an unknown field": (BOARD + "zzzzzzzz = 1\n", "'zzzzzzzz', which is not a field of a GPU; a GPU has name, arch"),
    "no name": (BOARD.replace('"NVIDIA A4500"', '""'), "has the name ''; it must be up to 100 printable"),
    "an unprintable name": (BOARD.replace("A4500", "\\u001b[0m"), "printable characters"),
    "a name that is none": (BOARD.replace('"NVIDIA A4500"', "7"), "has the name 7"),
    "a long name": (BOARD.replace("A4500", "x" * 200), "up to 100 printable"),
    "no architecture": (BOARD.replace('"sm_86"', '"ampere"'), "has the arch 'ampere'; it must be like sm_86"),
    "an option as architecture": (BOARD.replace("sm_86", "sm_86 -I/"), "has the arch 'sm_86 -I/'"),
    "Hopper without its own": (BOARD.replace("sm_86", "sm_90"), "has the arch 'sm_90'; .* sm_90a"),
    "no SM": (BOARD.replace("sms = 56", "sms = 0"), "has sms 0; it must be a whole number from 1 to 4,096"),
    "half an SM": (BOARD.replace("sms = 56", "sms = 56.5"), "has sms 56.5; it must be a whole number"),
    "a word": (BOARD.replace("sms = 56", 'sms = "56"'), "has sms '56'; it must be a whole number"),
    "a truth": (BOARD.replace("sms = 56", "sms = true"), "has sms True"),
    "not a number": (BOARD.replace("1.65", "nan"), "has clock_ghz nan; it must be a number from 0.01 to 20"),
    "an infinity": (BOARD.replace("94.6", "inf"), "has tensor_tflops inf"),
    "a clock in MHz": (BOARD.replace("1.65", "1650"), "has clock_ghz 1650; it must be a number from 0.01 to 20"),
    "a negative peak": (BOARD.replace("23.7", "-23.7"), "has fp32_tflops -23.7"),
    "a date": (BOARD.replace("640", "2020-01-01"), "has memory_gbs datetime"),
    "5,000 digits": (BOARD.replace("640", "9" * 5000), "is not a TOML file: it has a number of thousands of digits$"),
    "4,000 digits": (BOARD.replace("640", "9" * 4000), "has memory_gbs a number of more than 20 digits"),
    "half a warp": (BOARD.replace("1536", "1500"), "has threads_per_sm 1500; it must be a multiple of 32"),
    "a block larger than its SM": (BOARD.replace("102400", "101376"), "block 101376, with the driver's 1024"),
    "more than its architecture has": (
        BOARD.replace("102400", "233472").replace("101376", "232448"),
        "has shared_per_block 232448; a GPU of sm_86 has at most 101376",
    ),
    "more registers than there are": (BOARD.replace("65536", "131072"), "a GPU of sm_86 has at most 65536"),
    "no TOML": ("[board", "is not a TOML file: "),
    "a page": ("<html>\n" * 10, "is not a TOML file: "),
    "no text": (b"\xff\xfe\x00", "is not UTF-8 text"),
    "a null byte": (b"\x00", "is not a TOML file"),
    "tables in tables": ("x = " + "[" * 20_000, "is not a TOML file: its lists and objects are nested"),
    "a large file": ("#" * 100_000, "has more than 65536 bytes"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_gets_one_sentence_that_names_it(read, fault):
    text, said = FAULTS[fault]
    with pytest.raises(UsageError, match=said) as error:
        read(text)
    assert str(error.value).isprintable() and len(str(error.value)) < 500


def test_what_cannot_be_read_is_named(tmp_path):
    with pytest.raises(
        UsageError, match="cannot read .*none.toml: No such file or directory; --gpu-file takes a TOML file"
    ):
        read_gpu_file(tmp_path / "none.toml")
    with pytest.raises(UsageError, match="cannot read .*Is a directory"):
        read_gpu_file(tmp_path)


def test_an_endless_file_is_not_read_to_its_end():
    from pathlib import Path

    with pytest.raises(UsageError, match="has more than 65536 bytes"):
        read_gpu_file(Path("/dev/zero"))


@pytest.mark.parametrize("stored", [None, 3, [], {}, {"key": 3}, {"key": "x"}, {"key": "x", "name": []}])
def test_what_a_ledger_holds_is_checked_as_a_file_is(stored):
    with pytest.raises(UsageError, match="the ledger"):
        stored_fields(stored, "the ledger")


def test_a_pipe_that_nobody_writes_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="is not a file"):
        read_gpu_file(tmp_path / "pipe")
