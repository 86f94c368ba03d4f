from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from evoengine.errors import UsageError
from evoengine.gpu import Gpu
from evoengine.space.space import SearchSpace, load_space
from evoengine.workloads.base import Problem

Load = Callable[[str], SearchSpace]

CONSTRAINT = '[[constraint]]\nexpr = "{}"\nwhy = "because"\n'

FAULTS = {
    "syntax error": ("tile_m = [32, 64, 128]", "tile_m = [32, 64, 128", "not valid TOML", 5),
    "knob twice": ("warps  =", "tile_m =", "not valid TOML", 5),
    "unknown table": ("[cost.wmma]", "[costs.wmma]", "unknown key 'costs'; known are kernel, knobs, ", 19),
    "unknown top-level key": ('kernel = "', 'kernal = "', "unknown key 'kernal'; known are kernel", 1),
    "kernel missing": ('kernel = "attention"', "", "must name its kernel", None),
    "kernel empty": ('kernel = "attention"', 'kernel = ""', "must name its kernel", 1),
    "family not first": (
        'family = ["scalar", "wmma"]',
        'n = [1]\nfamily = ["scalar", "wmma"]',
        "the first knob must be family",
        2,
    ),
    "no family, and families in launch": (
        'family = ["scalar", "wmma"]',
        "n = [1]",
        "[launch.scalar] names no family; known are attention",
        11,
    ),
    "family of numbers": ('family = ["scalar", "wmma"]', "family = [1, 2]", "a plain list of names in quotes", 3),
    "empty domain": ("[32, 64, 128]", "[]", "knob tile_m has an empty domain", 4),
    "value twice": ("[32, 64, 128]", "[32, 64, 32]", "knob tile_m lists 32 twice", 4),
    "mixed types": ("[32, 64, 128]", '[32, "64"]', "knob tile_m mixes int and str", 4),
    "integers and decimals": ("[32, 64, 128]", "[32, 64.0]", "knob tile_m mixes float and int", 4),
    "domain of lists": ("[32, 64, 128]", "[[32]]", "integers, decimals, text or true/false only", 4),
    "value not finite": ("[32, 64, 128]", "[0.5, inf]", "finite", 4),
    "value too large": ("[32, 64, 128]", "[99999999999999999]", "at most 2^53", 4),
    "domain no list": ("[32, 64, 128]", "32", "knob tile_m needs a list of values", 4),
    "knob without values": ("values = [0, 8, 16], ", "", "knob pad needs a list of values", 6),
    "unknown key in a knob": (
        "values = [0",
        "value = [0",
        "unknown key 'value'; known are values, when, default; did you",
        6,
    ),
    "knob named as a function": ("warps  =", "min =", "'min' cannot name a knob", 5),
    "knob not a name": ("warps  =", "warps-m =", "'warps-m' cannot name a knob", 5),
    "knob named as the problem": ("warps  =", "heads =", "knob heads has the name of a problem variable", 5),
    "unknown knob in an expression": ("% (16 * warps)", "% (16 * wraps)", "names wraps, which is not a knob", 8),
    "unknown GPU variable": (
        "% (16 * warps)",
        "% gpu.sm",
        "names gpu.sm, which is not a GPU variable; did you mean",
        8,
    ),
    "a call": ("% (16 * warps)", "% len(warps)", "calls len; only ceil_div", 8),
    "text in arithmetic": ("% (16 * warps)", "% family", "calculates with family, which is text", 8),
    "a constraint that is text": ('expr = "tile_m % (16 * warps) == 0"', 'expr = "dtype"', "`dtype` is text", 8),
    "an expression that is a list": ('expr = "tile_m % (16 * warps) == 0"', "expr = [1]", "must be text in quotes", 8),
    "constraint without why": ('why  = "each warp owns whole 16-row stripes"', "", "the constraint has no why", 7),
    "constraint with an empty why": ("each warp owns whole 16-row stripes", " ", "the constraint has no why", 7),
    "constraint without expr": ('expr = "tile_m % (16 * warps) == 0"', "", "the constraint has no expr", 7),
    "unknown key in a constraint": ("why  =", "because =", "unknown key 'because'; known are expr, when, why", 10),
    "constraint no list": ("[[constraint]]", "[constraint]", "must be written [[constraint]]", 7),
    "when naming a later knob": ("family == 'wmma'\" }", 'split > 1" }\nsplit = [1, 2]', "declare split first", 6),
    "when naming its own knob": ("family == 'wmma'\" }", 'pad > 1" }', "declare pad first", 6),
    "launch missing": ("[launch.scalar]", "[cost.scalar]", "family scalar lacks [launch.scalar]", None),
    "launch of no family": ("[launch.scalar]", "[launch.scaler]", "names no family; known are scalar, wmma; did", 11),
    "cost of no family": ("[cost.wmma]", "[cost.mma]", "[cost.mma] names no family", 19),
    "launch key missing": ("shared  = 0", "", "[launch.scalar] has no shared", 11),
    "launch key unknown": ("shared  = 0", "shared = 0\nblocks = 1", "unknown key 'blocks'", 15),
    "grid of two": ('"ceil_div(seq_q, tile_m)", "heads", "batch"', '"heads", "batch"', "a list of three", 13),
    "no threads": ('threads = "32 * warps"', 'threads = "warps - 8"', "is -7 for family=scalar, tile_m=32, ", 12),
    "threads a decimal": ('threads = "32 * warps"', 'threads = "tile_m / 2"', "is 16.0 for family=scalar", 12),
    "threads of two": (
        'threads = "32 * warps"',
        'threads = [32, "warps"]',
        "or a list of three: those in x, y and z",
        12,
    ),
    "no threads along z": ('threads = "32 * warps"', 'threads = [32, 1, "warps - 1"]', "`warps - 1` is 0 for ", 12),
    "threads a condition": ('threads = "32 * warps"', 'threads = "warps > 0"', "needs a positive integer", 12),
    "grid of zero": ('"ceil_div(seq_q, tile_m)"', '"tile_m - 128"', "is -96 for family=scalar, tile_m=32", 13),
    "negative shared memory": ("shared  = 0", 'shared = "64 - tile_m"', "an integer of at least 0", 14),
    "launch with an inactive knob": ("shared  = 0", 'shared = "pad"', "needs pad, which has no value for ", 14),
    "cost dividing by zero": ("4 * tile_m *", "4 // pad *", "divides by zero for family=wmma", 20),
    "start with an unknown knob": ("pad    = 16", "pads    = 16", "names pads, which is not a knob; did you", 25),
    "start with an unknown value": ("pad    = 16", "pad    = 12", "has pad = 12; pad must be one of 0, 8, 16", 25),
    "start without an active knob": ("pad    = 16", "", "the start lacks pad", 21),
    "default outside of the domain": (
        "values = [0, 8, 16]",
        "values = [0, 8, 16], default = 4",
        "the default 4; pad",
        6,
    ),
    "default of another type": (
        "values = [0, 8, 16]",
        "values = [0, 8, 16], default = true",
        "the default True; pad",
        6,
    ),
    "start without a family": ('[[start]]\nfamily = "wmma"', "[[start]]", "the start lacks family", 21),
}


@pytest.mark.parametrize(("old", "new", "complaint", "line"), FAULTS.values(), ids=FAULTS.keys())
def test_a_fault_is_named_with_file_and_line_in_one_sentence(
    load: Load, small: str, tmp_path: Path, old: str, new: str, complaint: str, line: int | None
) -> None:
    assert old in small
    with pytest.raises(UsageError) as error:
        load(small.replace(old, new, 1))
    message = str(error.value)
    assert complaint in message
    assert "\n" not in message
    place = str(tmp_path / "space.toml")
    if "not valid TOML" in message:
        assert place in message and f"line {line}" in message
    else:
        assert message.startswith(f"{place}:{line}: " if line else f"{place}: ")


LETS = {
    "circle": ('[let]\na = "b"\nb = "a + 1"\n', "let a is defined in terms of itself", 27),
    "circle through a family": ('[let]\na = "b"\n[let.wmma]\nb = "a + 1"\n', "defined in terms of itself", 27),
    "unknown name": ('[let]\na = "tile_n"\n', "names tile_n, which is not a knob, let or problem", 27),
    "unknown family": ("[let.mma]\na = 1\n", "[let.mma] names no family", 26),
    "name of a knob": ("[let]\npad = 1\n", "let pad has the name of a knob", 27),
    "name of the problem": ("[let]\nseq_q = 1\n", "let seq_q has the name of a problem variable", 27),
    "name of a common let": ("[let]\na = 1\n[let.wmma]\na = 2\n", "let a has the name of a let of every family", 29),
    "text in arithmetic": ('[let]\na = "dtype"\nb = "a + 1"\n', "calculates with a, which is text", 28),
    "an inactive knob": (
        '[let]\nrow = "tile_m + pad"\n[[constraint]]\nexpr = "row % 2 == 0"\nwhy = "even"\n',
        "`tile_m + pad` needs pad, which has no value for family=scalar",
        27,
    ),
    "division by zero": (
        '[let]\na = "tile_m // pad"\n[[constraint]]\nexpr = "a > 2"\nwhen = "family == \'wmma\'"\nwhy = "x"\n',
        "`tile_m // pad` divides by zero for family=wmma, tile_m=32",
        27,
    ),
}


@pytest.mark.parametrize(("text", "complaint", "line"), LETS.values(), ids=LETS.keys())
def test_a_faulty_let_is_named_with_its_line(load: Load, small: str, text: str, complaint: str, line: int) -> None:
    with pytest.raises(UsageError) as error:
        load(small + text)
    assert complaint in str(error.value)
    assert f"space.toml:{line}: " in str(error.value)


def test_a_launch_that_needs_another_familys_let_is_refused(load: Load, small: str) -> None:
    with pytest.raises(UsageError, match=r"needs the let bytes, which family scalar does not have; .*\[let\.scalar\]"):
        load(small.replace("shared  = 0", 'shared = "bytes"') + "[let.wmma]\nbytes = 16\n")


def test_a_constraint_on_a_familys_let_applies_to_that_family_alone(load: Load, small: str) -> None:
    space = load(small + '[let.wmma]\nrow = "head_dim + pad"\n' + CONSTRAINT.format("row > 64"))
    assert {c.get("pad") for c in space.enumerate()} == {None, 8, 16}


def test_a_constraint_on_an_inactive_knob_does_not_apply(load: Load, small: str) -> None:
    space = load(small + CONSTRAINT.format("pad > 8 and tile_m > 32"))
    assert {c["tile_m"] for c in space.enumerate() if c["family"] == "scalar"} == {32, 64, 128}
    assert {c["tile_m"] for c in space.enumerate() if c["family"] == "wmma"} == {64, 128}


def test_a_when_does_not_hold_where_deciding_it_needs_an_inactive_knob(load: Load, small: str) -> None:
    nested = 'family == \'wmma\'" }\nskew = { values = [1, 2], when = "pad == 8 or tile_m == 32" }'
    space = load(small.replace("family == 'wmma'\" }", nested))
    assert {c["family"] for c in space.enumerate() if "skew" in c} == {"wmma"}
    assert all((c["pad"] == 8 or c["tile_m"] == 32) == ("skew" in c) for c in space.enumerate() if "pad" in c)


def test_a_when_tells_an_inactive_knob_from_every_value_of_its_domain(load: Load, small: str) -> None:
    knobs = 'family == \'wmma\' and warps < 8" }\nskew = { values = [1, 2], when = "warps == 8 or pad == 8" }'
    space = load(small.replace("family == 'wmma'\" }", knobs).replace("(head_dim + pad)", "head_dim"))
    assert all((c["warps"] == 8 or c.get("pad") == 8) == ("skew" in c) for c in space.enumerate())


def test_constraints_that_leave_nothing_name_the_one_that_removes_the_most(load: Load, small: str) -> None:
    with pytest.raises(UsageError) as error:
        load(small + CONSTRAINT.format("warps > 8") + CONSTRAINT.format("tile_m > 32"))
    assert "space.toml:27: the constraints leave nothing" in str(error.value)
    assert "because (`warps > 8`)" in str(error.value)


def test_a_constraint_that_binds_early_is_charged_with_all_it_rules_out(load: Load, small: str) -> None:
    # Two of three tiles go before warps and pad are bound: 2 rows, but 24 of 36 combinations.
    with pytest.raises(UsageError, match=r"because \(`tile_m > 64`\)"):
        load(small + CONSTRAINT.format("tile_m > 64") + CONSTRAINT.format("warps > 8"))


def test_constraints_that_contradict_each_other_leave_nothing(load: Load, small: str) -> None:
    with pytest.raises(UsageError, match="leave nothing"):
        load(small + CONSTRAINT.format("tile_m > 64") + CONSTRAINT.format("tile_m < 64"))


def test_knobs_and_lets_may_be_tables_of_their_own(load: Load, small: str) -> None:
    table = "[knobs.pad]\nvalues = [0, 8, 16]\nwhen = \"family == 'wmma'\"\n[[constraint]]"
    apart = small.replace("pad    = { values = [0, 8, 16], when = \"family == 'wmma'\" }\n", "")
    assert load(apart.replace("[[constraint]]", table)).size == load(small).size
    with pytest.raises(UsageError, match=r"space\.toml:6: knob pad has an empty domain"):
        load(apart.replace("[[constraint]]", table.replace("0, 8, 16", "")))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, problem: Problem, gpu: Gpu) -> None:
    missing, binary = tmp_path / "none.toml", tmp_path / "binary.toml"
    binary.write_bytes(b'kernel = "\xff"')
    for path, complaint in (
        (missing, f"there is no space file {missing}"),
        (binary, "is not UTF-8 text (byte 10)"),
        (tmp_path, "cannot be read: Is a directory"),
    ):
        with pytest.raises(UsageError) as error:
            load_space(path, problem, gpu)
        assert complaint in str(error.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_a_file_without_permission_is_named(tmp_path: Path, small: str, problem: Problem, gpu: Gpu) -> None:
    path = tmp_path / "space.toml"
    path.write_text(small)
    path.chmod(0)
    with pytest.raises(UsageError, match="cannot be read: Permission denied"):
        load_space(path, problem, gpu)
