from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import chisquare

from evoengine.errors import UsageError
from evoengine.gpu import Gpu
from evoengine.records import Config, Launch, config_key
from evoengine.space import rows
from evoengine.space.space import SearchSpace, load_space
from evoengine.workloads.base import Problem
from tests.support.spaces import launches

Load = Callable[[str], SearchSpace]

LAYERED = """\
kernel = "attention"
[knobs]
family  = ["scalar", "wmma", "mma"]
tile    = [16, 32, 64]
swizzle = { values = ["none", "64B", "128B"], when = "family == 'mma'" }
pad     = { values = [0, 8], when = "family == 'wmma' or swizzle == 'none'" }
warps   = [1, 2, 4]
reuse   = { values = [false, true], when = "tile > 16 and family != 'scalar'" }
split   = { values = [0.25, 0.5], when = "warps == 4" }
[let]
rows  = "tile // warps"
width = "head_dim + extra"
extra = "pad if family == 'wmma' or family == 'mma' and swizzle == 'none' else 0"
[let.mma]
slots = "2 if reuse else 3"
[[constraint]]
expr = "rows >= 8"
why  = "a warp owns at least 8 rows"
[[constraint]]
expr = "tile * width * element_bytes <= 8192"
when = "family != 'scalar'"
why  = "the tile fits its share of shared memory"
[[constraint]]
expr = "pad > 0"
when = "tile == 32"
why  = "32 rows collide without padding"
[[constraint]]
expr = "slots * tile > 48"
why  = "fewer slots leave the tensor cores idle"
when = "reuse or not reuse"
[[constraint]]
expr = "split * tile >= 16 and not reuse"
why  = "a share is a whole stripe"
[launch.scalar]
threads = "32 * warps"
grid    = ["ceil_div(seq_q, tile)", "heads", "batch"]
shared  = "0"
[launch.wmma]
threads = "32 * warps"
grid    = ["ceil_div(seq_q, tile)", "heads", "batch"]
shared  = "tile * width"
[launch.mma]
threads = "32 * warps"
grid    = ["ceil_div(seq_q, tile)", "heads", "batch"]
shared  = "tile * width"
"""


def layered_by_hand() -> list[dict[str, object]]:
    """The valid space of LAYERED at head_dim 64 and 2 bytes per element, spelled out in plain Python."""
    domains = {
        "family": ["scalar", "wmma", "mma"],
        "tile": [16, 32, 64],
        "swizzle": ["none", "64B", "128B", None],
        "pad": [0, 8, None],
        "warps": [1, 2, 4],
        "reuse": [False, True, None],
        "split": [0.25, 0.5, None],
    }
    valid = []
    for values in itertools.product(*domains.values()):
        c = dict(zip(domains, values, strict=True))
        family, tile, pad, warps, reuse, split = (c[n] for n in ("family", "tile", "pad", "warps", "reuse", "split"))
        active = {
            "swizzle": family == "mma",
            "pad": family == "wmma" or c["swizzle"] == "none",
            "reuse": tile > 16 and family != "scalar",
            "split": warps == 4,
        }
        if any((c[name] is not None) != is_active for name, is_active in active.items()):
            continue
        extra = pad if pad is not None else 0
        if (
            tile // warps < 8
            or (family != "scalar" and tile * (64 + extra) * 2 > 8192)
            or (tile == 32 and pad == 0)
            or (family == "mma" and reuse is not None and (2 if reuse else 3) * tile <= 48)
            or (split is not None and reuse is not None and not (split * tile >= 16 and not reuse))
        ):
            continue
        valid.append({name: value for name, value in c.items() if value is not None})
    return valid


def keys(configs: list[dict[str, object]]) -> list[str]:
    return [config_key(config) for config in configs]


def test_enumeration_is_the_brute_force_product_filtered_by_hand(load: Load) -> None:
    space = load(LAYERED)
    found = list(space.enumerate())
    assert keys(found) == keys(layered_by_hand())
    assert len(space) == space.valid == len(found)
    assert all(list(c) == [k.name for k in space.knobs if k.name in c] for c in found), "knobs stand in declared order"


def test_contains_agrees_with_the_enumeration_on_every_combination(load: Load) -> None:
    space = load(LAYERED)
    valid = set(keys(list(space.enumerate())))
    domains = [[*k.values, None] for k in space.knobs]
    for values in itertools.product(*domains):
        config = {k.name: v for k, v in zip(space.knobs, values, strict=True) if v is not None}
        assert space.contains(config) == (config_key(config) in valid), (config, space.why_invalid(config))


@pytest.mark.parametrize("limits", [{}, {"MAX_COUNTED": 0}, {"MAX_COUNTED": 0, "MAX_NUMBERED": 1}])
def test_random_constraints_leave_what_checking_each_combination_leaves(load: Load, monkeypatch, limits) -> None:
    """However settings are told apart, and in the order of knobs though those that no rule names are walked last."""
    for name, value in limits.items():
        monkeypatch.setattr(rows, name, value)
    rng = np.random.default_rng(3)
    clauses = ["a * {n} > b", "(a + b) % {n} != 0", "c < {n}", "d >= a - {n}", "b // a <= {n}", "total % {n} < 3"]
    for _ in range(40):
        texts = [str(rng.choice(clauses)).format(n=rng.integers(2, 6)) for _ in range(3)]
        whens = [str(rng.choice(["a > 1", "family == 'x'", "d == 2", "c in [1, 2]"])) for _ in range(3)]
        constraints = "".join(
            f'[[constraint]]\nexpr = "{e}"\nwhen = "{w}"\nwhy = "{e}"\n' for e, w in zip(texts, whens, strict=True)
        )
        space = load(
            'kernel = "k"\n[knobs]\nfamily = ["x", "y"]\na = [1, 2, 3]\nb = [2, 4, 8]\n'
            "c = { values = [1, 2, 3], when = \"family == 'x' and b < 8\" }\n"
            'd = { values = [2, 4], when = "a != 2" }\n[let]\ntotal = "a + b"\n' + constraints + launches("x", "y")
        )
        every = itertools.product("xy", [1, 2, 3], [2, 4, 8], [1, 2, 3, None], [2, 4, None])
        configs = [{n: v for n, v in zip("fabcd", values, strict=True) if v is not None} for values in every]
        configs = [{"family": c.pop("f"), **c} for c in configs]
        assert list(space.enumerate()) == [c for c in configs if space.contains(c)]


def test_size_counts_a_conditional_knob_once_where_it_is_inactive(load: Load, small: str) -> None:
    assert load(small).size == 3 * 4 + 3 * 4 * 3
    # tile > 16 opens reuse, warps == 4 opens split: (1 + 2·2) × (1 + 1 + 2) per setting of swizzle and pad
    assert load(LAYERED).size == 3 * (1 + 1 + 2) + (2 + 2 + 1 + 1) * (1 + 2 * 2) * (1 + 1 + 2)


def test_configurations_hold_plain_python_values(load: Load) -> None:
    space = load(LAYERED)
    every = list(space.enumerate())
    drawn = [*every, *space.sample(np.random.default_rng(0), 50), *space.neighbours(every[0])]
    assert {type(v) for config in drawn for v in config.values()} == {str, int, float, bool}
    assert {type(config) for config in drawn} == {dict}


def uniform(counts: list[int]) -> bool:
    return bool(chisquare(counts).pvalue > 0.001)


def evenly(drawn: list[dict[str, object]]) -> bool:
    """Whether the families came alike, and within each its configurations."""
    by_family = {f: Counter(config_key(c) for c in drawn if c["family"] == f) for f in {c["family"] for c in drawn}}
    within = all(uniform(list(counts.values())) for counts in by_family.values())
    return within and uniform([counts.total() for counts in by_family.values()])


def test_sampling_gives_each_family_alike_and_is_uniform_within_it_and_the_same_for_the_same_seed(load: Load) -> None:
    space = load(LAYERED)
    drawn = space.sample(np.random.default_rng(11), 200 * len(space))
    assert drawn == space.sample(np.random.default_rng(11), 200 * len(space))
    assert set(keys(drawn)) == set(keys(list(space.enumerate())))
    assert evenly(drawn)


def test_the_check_of_evenness_sees_a_sampler_that_draws_from_the_whole_or_favours_some(load: Load) -> None:
    space, rng = load(LAYERED), np.random.default_rng(11)
    every = list(space.enumerate())
    whole = [every[i] for i in rng.integers(len(every), size=200 * len(every))]
    by_family = [[c for c in every if c["family"] == f] for f in space.families]
    favoured = [family[int(len(family) * rng.random() ** 1.2)] for _ in range(70 * len(every)) for family in by_family]
    assert not evenly(whole)
    assert not evenly(favoured)


def test_neighbours_are_valid_distinct_and_never_the_configuration_itself(load: Load) -> None:
    space = load(LAYERED)
    for config in space.enumerate():
        around = space.neighbours(config)
        assert all(space.contains(c) for c in around)
        assert len(set(keys(around))) == len(around)
        assert config_key(config) not in keys(around)
        assert around == space.neighbours(dict(reversed(config.items()))), "the order of a config's keys is no matter"


def test_neighbours_hold_every_valid_configuration_with_the_same_knobs_and_one_other_value(load: Load) -> None:
    space = load(LAYERED)
    valid = list(space.enumerate())
    for config in valid:
        one_away = [c for c in valid if c.keys() == config.keys() and sum(c[n] != config[n] for n in c) == 1]
        # A new family with the same knobs counts; everything that switches knobs comes beside it.
        assert set(keys(one_away)) <= set(keys(space.neighbours(config)))


def test_a_change_that_switches_knobs_keeps_the_rest_as_near_as_the_space_allows(load: Load, small: str) -> None:
    space = load(small)
    assert space.neighbours({"family": "scalar", "tile_m": 128, "warps": 8})[0] == (
        {"family": "wmma", "tile_m": 128, "warps": 8, "pad": 0}
    )
    # 32 rows cannot feed 8 warps: warps goes to the nearest count that they feed.
    assert space.neighbours({"family": "scalar", "tile_m": 32, "warps": 8})[0] == (
        {"family": "wmma", "tile_m": 32, "warps": 2, "pad": 0}
    )
    assert space.neighbours({"family": "wmma", "tile_m": 64, "warps": 2, "pad": 16})[0] == (
        {"family": "scalar", "tile_m": 64, "warps": 2}
    )


def test_a_change_that_switches_knobs_rather_moves_a_knob_far_than_switches_it_off(load: Load) -> None:
    space = load(
        'kernel = "k"\n[knobs]\nfamily = ["a", "b"]\nmode = { values = [0, 1], when = "family == \'b\'" }\n'
        "x = { values = [1, 2, 3], when = \"family == 'a' or mode == 1\" }\n"
        '[[constraint]]\nexpr = "x == 3"\nwhen = "family == \'b\'"\nwhy = "b knows no other"\n' + launches("a", "b")
    )
    assert space.neighbours({"family": "a", "x": 1})[0] == {"family": "b", "mode": 1, "x": 3}


def test_encode_and_decode_are_each_others_inverse(load: Load) -> None:
    space = load(LAYERED)
    for config in space.enumerate():
        row = space.encode(config)
        assert space.decode(row) == config
        assert [i >= 0 for i in row] == [k.name in config for k in space.knobs]
    with pytest.raises(UsageError, match="tile must be one of 16, 32, 64, not 17"):
        space.encode({"family": "mma", "tile": 17})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tile_m": 48}, "tile_m must be one of 32, 64, 128, not 48"),
        ({"tile_m": True}, "tile_m must be one of 32, 64, 128, not True"),
        ({"tile_m": 64.0}, "tile_m must be one of 32, 64, 128, not 64.0"),
        ({"family": "mma"}, "family must be one of scalar, wmma, not 'mma'"),
        ({"family": ["wmma"]}, "family must be one of scalar, wmma, not ['wmma']"),
        ({"family": "scalar"}, "pad is set where it is inactive; it needs family == 'wmma'"),
        ({"stages": 2}, "stages is not a knob of this space"),
        ({"warps": 8}, "each warp owns whole 16-row stripes"),
        ({}, None),
    ],
)
def test_an_invalid_configuration_is_told_why(load: Load, small: str, change: dict, reason: str | None) -> None:
    config = {"family": "wmma", "tile_m": 64, "warps": 4, "pad": 8, **change}
    assert load(small).why_invalid(config) == reason


def test_a_missing_knob_is_named(load: Load, small: str) -> None:
    space = load(small)
    assert space.why_invalid({"family": "wmma", "tile_m": 64, "warps": 4}) == "pad is missing"
    assert space.why_invalid({"tile_m": 64}) == "family must be one of scalar, wmma, not None"


def test_launch_and_cost_are_evaluated_for_the_bound_problem_or_another(
    load: Load, small: str, problem: Problem
) -> None:
    space = load(small)
    config: Config = {"family": "wmma", "tile_m": 64, "warps": 4, "pad": 16}
    assert space.launch(config) == Launch(grid=(32, 16, 16), threads=128, shared_bytes=64 * 80 * 2)
    ragged = replace(problem, batch=1, seq_q=65)
    assert space.launch(config, ragged) == Launch(grid=(2, 16, 1), threads=128, shared_bytes=64 * 80 * 2)
    assert space.cost(config) == {"tensor_flops": 4.0 * 64 * 2048 * 64}
    assert space.cost({"family": "scalar", "tile_m": 64, "warps": 4}) == {}


def test_threads_may_be_given_along_three_axes(load: Load, small: str) -> None:
    space = load(small.replace('threads = "32 * warps"', 'threads = ["tile_m // 2", "warps", 2]'))
    launch = space.launch({"family": "wmma", "tile_m": 32, "warps": 2, "pad": 0})
    assert (launch.threads, launch.block) == (64, (16, 2, 2))


def test_the_problem_and_the_gpu_decide_what_is_valid(tmp_path: Path, small: str, problem: Problem, gpu: Gpu) -> None:
    path = tmp_path / "space.toml"
    shared = '[[constraint]]\nexpr = "tile_m * head_dim * 8 <= gpu.shared_per_block"\nwhy = "it fits"\n'
    path.write_text(small + shared)
    wide, narrow = problem, replace(problem, head_dim=32)
    tight = replace(gpu, shared_per_block=32768)
    assert {c["tile_m"] for c in load_space(path, wide, gpu).enumerate()} == {32, 64, 128}
    assert {c["tile_m"] for c in load_space(path, wide, tight).enumerate()} == {32, 64}
    assert {c["tile_m"] for c in load_space(path, narrow, tight).enumerate()} == {32, 64, 128}


def test_a_start_that_is_invalid_here_is_dropped_with_the_reason(load: Load, small: str) -> None:
    space = load(small + '[[start]]\nfamily = "wmma"\ntile_m = 32\nwarps = 8\npad = 0\n')
    assert space.starts == ({"family": "wmma", "tile_m": 64, "warps": 4, "pad": 16},)
    assert space.dropped_starts == (
        ({"family": "wmma", "tile_m": 32, "warps": 8, "pad": 0}, "each warp owns whole 16-row stripes"),
    )


DEFAULTS = """\
kernel = "attention"
start = [
    # small
    { family = "wmma", tile_m = 64 },
    { family = "wmma", tile_m = 64, load = "late", depth = 4 },
    { family = "scalar", tile_m = 32 },
]
[knobs]
family = ["scalar", "wmma"]
tile_m = [32, 64]
load = { values = ["early", "late"], when = "family == 'wmma'", default = "early" }
depth = { values = [1, 2, 4], when = "load == 'late'", default = 2 }
pad = { values = [0, 8], default = 8 }
""" + launches("scalar", "wmma")


def test_a_knob_that_a_start_does_not_name_has_its_default_where_it_is_active(load: Load) -> None:
    assert load(DEFAULTS).starts == (
        {"family": "wmma", "tile_m": 64, "load": "early", "pad": 8},
        {"family": "wmma", "tile_m": 64, "load": "late", "depth": 4, "pad": 8},
        {"family": "scalar", "tile_m": 32, "pad": 8},
    )
    late = load(DEFAULTS.replace(", depth = 4", ""))
    assert late.starts[1] == {"family": "wmma", "tile_m": 64, "load": "late", "depth": 2, "pad": 8}


def test_a_start_that_names_an_inactive_knob_is_dropped_for_it(load: Load) -> None:
    space = load(DEFAULTS.replace("tile_m = 32 }", 'tile_m = 32, load = "late" }'))
    assert len(space.starts) == 2 and "load is set where it is inactive" in space.dropped_starts[0][1]


@pytest.mark.parametrize(
    ("old", "new", "says", "line"),
    [
        ('load = "late", depth', 'laod = "late", depth', "the start names laod, which is not a knob", 5),
        ("tile_m = 64 }", "tile_m = 48 }", "the start has tile_m = 48", 4),
        (", tile_m = 32 }", " }", "the start lacks tile_m; give it a value, or the knob a default", 6),
    ],
)
def test_a_fault_in_a_start_on_a_line_of_its_own_is_named_with_the_line(
    load: Load, old: str, new: str, says: str, line: int
) -> None:
    assert old in DEFAULTS
    with pytest.raises(UsageError) as error:
        load(DEFAULTS.replace(old, new, 1))
    assert says in str(error.value) and f".toml:{line}: " in str(error.value)


def test_families_start_in_turn(load: Load, small: str) -> None:
    def start(family: str, tile_m: int, rest: str) -> str:
        return f'[[start]]\nfamily = "{family}"\ntile_m = {tile_m}\n{rest}\n'

    wmma, scalar = "warps = 4\npad = 16", "warps = 2"
    space = load(small + start("wmma", 128, wmma) + start("scalar", 64, scalar) + start("scalar", 32, scalar))
    found = space.first_points(np.random.default_rng(0))
    assert {operator for _, operator in found} == {"start"}
    assert [(c["family"], c["tile_m"]) for c, _ in found] == [
        ("wmma", 64), ("scalar", 64), ("wmma", 128), ("scalar", 32),
    ]  # fmt: skip


def test_a_family_without_a_start_is_drawn_from_as_often_as_the_others_start(load: Load, small: str) -> None:
    more = "".join(f'[[start]]\nfamily = "wmma"\ntile_m = {m}\nwarps = 2\npad = 0\n' for m in (32, 64, 128))
    space = load(small + more)
    found = space.first_points(np.random.default_rng(0))
    assert [(c["family"], operator) for c, operator in found] == [("wmma", "start"), ("scalar", "random")] * 4
    drawn = [c for c, operator in found if operator == "random"]
    assert len({config_key(c) for c in drawn}) == 4 and all(map(space.contains, drawn))
    assert space.first_points(np.random.default_rng(1)) != found


def test_where_no_family_has_a_start_the_sampler_draws_from_all_alike(load: Load, small: str) -> None:
    space = load(small.partition("[[start]]")[0])
    assert space.first_points(np.random.default_rng(0)) == []


def test_a_family_left_empty_is_reported_with_the_constraint_that_removed_the_most(load: Load, small: str) -> None:
    space = load(
        small
        + '[[constraint]]\nexpr = "tile_m > 128"\nwhen = "family == \'wmma\'"\nwhy = "the tile is large"\n'
        + '[[constraint]]\nexpr = "pad > 0"\nwhy = "banks collide"\n'
    )
    assert space.empty_families.keys() == {"wmma"}
    assert "the tile is large" in space.empty_families["wmma"]
    assert {c["family"] for c in space.enumerate()} == {"scalar"}
    assert {c["family"] for c in space.sample(np.random.default_rng(0), 20)} == {"scalar"}
    assert all(c["family"] == "scalar" for c in space.neighbours({"family": "scalar", "tile_m": 64, "warps": 2}))


def test_families_asked_for_by_name_are_the_whole_space_in_the_files_order(tmp_path, problem, gpu, small: str) -> None:
    path = tmp_path / "space.toml"
    path.write_text(small)
    whole, wmma = load_space(path, problem, gpu), load_space(path, problem, gpu, ["wmma"])
    assert list(wmma.enumerate()) == [c for c in whole.enumerate() if c["family"] == "wmma"]
    assert (wmma.families, wmma.starts) == (("wmma",), whole.starts)
    assert load_space(path, problem, gpu, ["scalar"]).starts == ()
    both = load_space(path, problem, gpu, ["wmma", "scalar"])
    assert list(both.enumerate()) == list(whole.enumerate())


def test_a_family_asked_for_by_name_must_be_there_and_possible(tmp_path, problem, gpu, small: str) -> None:
    path = tmp_path / "space.toml"
    path.write_text(small + '[[constraint]]\nexpr = "pad > 16"\nwhy = "banks collide"\n')
    assert load_space(path, problem, gpu).empty_families.keys() == {"wmma"}
    with pytest.raises(UsageError, match="the family wmma is not possible here: banks collide"):
        load_space(path, problem, gpu, ["scalar", "wmma"])
    with pytest.raises(UsageError, match="banks collide"):
        load_space(path, problem, gpu, ["wmma"])
    with pytest.raises(UsageError, match="family must be one of scalar, wmma, not 'mma'"):
        load_space(path, problem, gpu, ["mma"])


def test_many_families_of_unlike_sizes_are_counted_and_sampled_alike(load: Load) -> None:
    count = 500
    families = ", ".join(f'"f{i}"' for i in range(count))
    of_each = "".join(f'[launch.f{i}]\nthreads = "n"\ngrid = [1, 1, 1]\nshared = {i}\n' for i in range(count))
    lets = "".join(f"[let.f{i}]\nlimit = {i % 5}\n" for i in range(count))
    space = load(
        f'kernel = "k"\n[knobs]\nfamily = [{families}]\nn = [1, 2, 3, 4]\n{lets}'
        f'[[constraint]]\nexpr = "n <= limit"\nwhy = "the family ends there"\n{of_each}'
    )
    assert space.size == 4 * count
    assert len(space) == count // 5 * (0 + 1 + 2 + 3 + 4)
    assert len(space.empty_families) == count // 5
    drawn = space.sample(np.random.default_rng(5), 20_000)
    limits = Counter(int(str(c["family"])[1:]) % 5 for c in drawn)
    assert uniform([limits[i] for i in range(1, 5)])
    assert space.launch(drawn[0]).shared_bytes == int(str(drawn[0]["family"])[1:])


def test_the_space_says_what_it_was_read_from(load: Load, small: str) -> None:
    space = load(small)
    assert (space.name, space.kernel, space.text) == ("space.toml", "attention", small)
    assert space.families == ("scalar", "wmma")
    assert [(k.name, k.ordinal) for k in space.knobs] == [
        ("family", False),
        ("tile_m", True),
        ("warps", True),
        ("pad", True),
    ]
    assert space.sha256 == load(small).sha256 != load(small + "\n").sha256


# the launch on GPUs with other numbers of SMs

TILES = '["ceil_div(seq_q, tile_m)", "heads", "batch"]'


def test_a_launch_that_names_the_sms_is_given_for_each_number_of_them(load, small):
    space = load(small.replace(TILES, '["min(seq_q, 2 * gpu.sms)", 1, 1]'))
    config = next(space.enumerate())
    grids = space.grids_by_sms(config, [1, 114, 132])
    assert grids == {1: (2, 1, 1), 114: (228, 1, 1), 132: (264, 1, 1)}
    assert space.launch(config).grid == grids[132]


def test_a_launch_that_does_not_name_the_sms_is_the_same_on_every_gpu(load, small):
    space = load(small)
    assert space.grids_by_sms(next(space.enumerate()), range(1, 200)) == {}


def test_a_number_of_sms_for_which_the_rule_gives_no_launch_is_left_out(load, small):
    space = load(small.replace(TILES, '["gpu.sms - 100", 1, 1]'))
    assert space.grids_by_sms(next(space.enumerate()), [99, 100, 114]) == {114: (14, 1, 1)}
