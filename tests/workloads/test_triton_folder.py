"""A folder with triton.json names a file, its kernel and the functions around it."""

from __future__ import annotations

import json

import pytest

from evoengine.errors import UsageError
from evoengine.workloads.triton_kernel import read_folder

RIGHT = {"file": "k.py", "kernel": "scale", "call": "call", "reference": "reference"}


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "scale"
    made.mkdir()
    (made / "k.py").write_text("x = 1\n", "utf-8")
    return made


def write(folder, stated):
    (folder / "triton.json").write_text(stated if isinstance(stated, str) else json.dumps(stated), "utf-8")


def test_it_names_the_file_and_its_functions(folder):
    write(folder, RIGHT)
    host = read_folder(folder)
    assert (host.file, host.text) == (str(folder / "k.py"), "x = 1\n")
    assert (host.kernel, host.call, host.reference) == ("scale", "call", "reference")
    write(folder, {k: v for k, v in RIGHT.items() if k != "reference"})
    assert read_folder(folder).reference is None


@pytest.mark.parametrize(
    ("stated", "said"),
    [
        ("{", "cannot be read"),
        ([], "must have file, kernel and call"),
        (RIGHT | {"call": 3}, "must have file, kernel and call"),
        (RIGHT | {"reference": 3}, "may have file, kernel, call, reference"),
        (RIGHT | {"grid": "x"}, "may have file, kernel, call, reference, each a text, and nothing else"),
        (RIGHT | {"kernel": "other"}, "names the kernel other, and its folder is scale"),
        (RIGHT | {"file": "none.py"}, "there is no file"),
    ],
)
def test_what_is_wrong_is_named(folder, stated, said):
    write(folder, stated)
    with pytest.raises(UsageError, match=said):
        read_folder(folder)
