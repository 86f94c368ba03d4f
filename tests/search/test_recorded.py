from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from evoengine.errors import UsageError
from evoengine.search.proposer import Proposer
from evoengine.search.recorded import read_recorded

CACHE = {
    "device_name": "A GPU",
    "kernel_name": "saxpy",
    "problem_size": [64],
    "tune_params_keys": ["block", "tile", "n"],
    "tune_params": {"block": [32, 64, 128], "tile": [1, 2], "n": [7]},
    "objective": "time",
    "cache": {
        "32,1,7": {"block": 32, "tile": 1, "n": 7, "time": 2.0, "times": [2.0], "GFLOP/s": 5.0},
        "64,1,7": {"block": 64, "tile": 1, "n": 7, "time": 1.0, "times": [1.0], "GFLOP/s": 10.0},
        "64,2,7": {"block": 64, "tile": 2, "n": 7, "time": "RuntimeFailedConfig", "times": []},
        "128,2,7": {"block": 128, "tile": 2, "n": 7, "time": 3.0, "times": [3.0], "GFLOP/s": 3.3},
    },
}


def result(block: int, tile: int, ms: float | None, samples: Sequence[float] = ()) -> dict:
    found = {"times": {"runtimes": list(samples)}} if samples else {}
    found |= {"configuration": {"block": block, "tile": tile, "n": 7}, "objectives": ["time"]}
    if ms is None:
        return found | {"invalidity": "runtime", "measurements": [{"name": "time", "value": "failed", "unit": ""}]}
    return found | {"invalidity": "correct", "measurements": [{"name": "time", "value": ms, "unit": ""}]}


T4 = {
    "schema_version": "1.0.0",
    "metadata": {"timeunit": "miliseconds"},
    "results": [result(32, 1, 2.0), result(64, 1, 1.0), result(64, 2, None), result(128, 2, 3.0)],
}


@pytest.fixture
def write(tmp_path: Path):
    def written(content: object, name: str = "saxpy_GPU.json") -> Path:
        text = content if isinstance(content, str) else json.dumps(content)
        path = tmp_path / name
        path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
        return path

    return written


@pytest.mark.parametrize("name", ["saxpy_GPU.json", "saxpy_GPU.json.gz"])
@pytest.mark.parametrize("content", [CACHE, T4], ids=["cache", "T4"])
def test_both_formats_give_the_same_space(write, content, name):
    space = read_recorded(write(content, name))
    assert space.name == "saxpy_GPU"
    assert {k.name: k.values for k in space.knobs} == {"block": (32, 64, 128), "tile": (1, 2), "n": (7,)}
    assert space.rows.tolist() == [[0, 0, 0], [1, 0, 0], [1, 1, 0], [2, 1, 0]]
    np.testing.assert_array_equal(space.times, [2.0, 1.0, np.nan, 3.0])
    assert space.optimum == 1.0


@pytest.mark.parametrize("content", [CACHE, T4], ids=["cache", "T4"])
def test_each_configuration_keeps_its_samples_in_ms(write, content):
    """Few or many, of a repeated configuration the last one's, and none of a failed one."""
    first = CACHE["cache"]["32,1,7"]
    cache = CACHE["cache"] | {"32,1,7": first | {"times": [7.0]}, "again": first | {"times": [2.5, 1.5, 2.0]}}
    results = [result(32, 1, 2.0, [7.0]), *T4["results"][1:3], result(128, 2, 3.0, [3.0])]
    results.append(result(32, 1, 2.0, [2.5, 1.5, 2.0]))
    space = read_recorded(write(content | {"cache": cache} if content is CACHE else T4 | {"results": results}))
    samples = {tuple(c.values())[:2]: space.samples_of(c).tolist() for c in space.enumerate()}
    of_second = [1.0] if content is CACHE else []
    assert samples == {(32, 1): [2.5, 1.5, 2.0], (64, 1): of_second, (64, 2): [], (128, 2): [3.0]}


def test_samples_of_a_t4_file_are_in_its_unit(write):
    """Of the figure's own unit they know nothing."""
    measured = result(32, 1, 2.0, [2000.0, 2500.0])
    measured["measurements"][0]["unit"] = "ms"
    space = read_recorded(write(T4 | {"metadata": {"timeunit": "microseconds"}, "results": [measured]}))
    assert (space.optimum, space.samples.tolist()) == (2.0, [2.0, 2.5])


def test_a_cache_names_its_device_and_why_a_configuration_failed(write):
    space = read_recorded(write(CACHE))
    assert space.device == "A GPU"
    failed = {"block": 64, "tile": 2, "n": 7}
    assert space.time(failed) is None
    assert space.reason(failed) == "RuntimeFailedConfig"
    assert space.reason({"block": 64, "tile": 1, "n": 7}) is None


def test_times_of_a_t4_file_in_seconds_become_milliseconds(write):
    assert read_recorded(write(T4 | {"metadata": {"timeunit": "seconds"}})).optimum == 1000.0
    assert read_recorded(write(T4 | {"metadata": {"timeunit": "nanoseconds"}})).optimum == 1e-6


def test_the_unit_of_a_figure_goes_before_that_of_the_file(write):
    content = json.loads(json.dumps(T4).replace('"unit": ""', '"unit": "us"'))
    assert read_recorded(write(content)).optimum == 1e-3


def test_a_t4_file_names_its_device(write):
    assert read_recorded(write(T4 | {"metadata": {"device": "A GPU"}})).device == "A GPU"


def estimate(block: int, tile: int, ms: float) -> dict:
    return json.loads(json.dumps(result(block, tile, ms)).replace('"time"', '"estimated time"'))


def test_results_that_were_only_estimated_are_left_out_and_counted(write):
    space = read_recorded(write(T4 | {"results": [estimate(16, 1, 0.1), *T4["results"], estimate(128, 1, 0.2)]}))
    assert (len(space), space.optimum, space.estimated) == (4, 1.0, 2)
    assert space.knobs[0].values == (32, 64, 128)


def test_of_a_configuration_tried_several_times_the_last_counts_and_contradictions_are_counted(write):
    """Times 20 % apart contradict each other, and so do a time and a failure; 5 % apart, or two failures, do not."""
    again = [result(32, 1, 2.4), result(64, 1, None), result(64, 2, None), result(128, 2, 3.15)]
    space = read_recorded(write(T4 | {"results": [*T4["results"], *again]}))
    assert (space.contradicting, space.time({"block": 32, "tile": 1, "n": 7})) == (2, 2.4)
    assert read_recorded(write(T4 | {"results": T4["results"] * 2})).contradicting == 0


def test_an_estimate_of_evoengines_first_exports_is_known_by_its_outcome(write):
    """Where it is called `time`, as a measured one is."""
    old = result(16, 1, 0.1) | {"evoengine": {"outcome": "estimated"}}
    assert read_recorded(write(T4 | {"results": [old, *T4["results"]]})).optimum == 1.0


@pytest.mark.parametrize("place", ["GFLOP/s", "__error__"])
def test_a_failure_may_stand_in_place_of_another_objective(write, place):
    """As Kernel Tuner writes it where it tunes for GFLOP/s, and, since it has several objectives, wherever it fails."""
    failed = {"block": 64, "tile": 2, "n": 7, place: "CompilationFailedConfig"}
    space = read_recorded(write(CACHE | {"objective": "GFLOP/s", "cache": CACHE["cache"] | {"64,2,7": failed}}))
    assert space.reason({"block": 64, "tile": 2, "n": 7}) == "CompilationFailedConfig"
    np.testing.assert_array_equal(space.times, [2.0, 1.0, np.nan, 3.0])


@pytest.mark.parametrize("content", [CACHE, T4], ids=["cache", "T4"])
def test_a_time_beyond_all_measure_is_the_failure_that_it_stands_for(write, content):
    """Kernel Tuner's early versions gave 1e20 to a configuration that failed."""
    space = read_recorded(write(json.loads(json.dumps(content).replace(": 3.0", ": 1e20"))))
    np.testing.assert_array_equal(space.times, [2.0, 1.0, np.nan, np.nan])
    assert space.reason({"block": 128, "tile": 2, "n": 7}) == "1e+20"


@pytest.mark.parametrize("content", [CACHE, T4], ids=["cache", "T4"])
def test_of_a_configuration_that_was_tried_twice_the_last_counts(write, content):
    again = next(iter(CACHE["cache"].values())) | {"time": 9.0}
    twice = {"cache": CACHE["cache"] | {"again": again}, "results": [*T4["results"], result(32, 1, 9.0)]}
    space = read_recorded(write({key: twice.get(key, value) for key, value in content.items()}))
    assert len(space) == 4
    np.testing.assert_array_equal(space.times, [9.0, 1.0, np.nan, 3.0])


FAMILIES = [
    {"family": "a", "tile": 1},
    {"family": "b", "warps": 4, "tile": 1},
    {"family": "b", "warps": 8, "tile": 2},
    {"family": "b", "warps": 8, "tile": 1},
]


def conditional(configs: list[dict]) -> dict:
    return T4 | {"results": [result(1, 1, 1.0 + i) | {"configuration": c} for i, c in enumerate(configs)]}


@pytest.mark.parametrize("sampler", ["evolution", "random"])
def test_knobs_of_some_families_only_are_searched_as_evoengine_exports_them(write, sampler):
    space = read_recorded(write(conditional(FAMILIES)))
    assert [knob.name for knob in space.knobs] == ["family", "warps", "tile"]
    assert [*space.enumerate()] == FAMILIES == [space.decode(space.encode(c)) for c in FAMILIES]
    assert not space.contains({"family": "a", "warps": 4, "tile": 1})
    proposer, found = Proposer(space, sampler, seed=0), []
    while proposal := proposer.propose():
        proposer.tell(proposal, [1 / space.time(proposal.config)])
        found.append(proposal.config)
    assert sorted(map(str, found)) == sorted(map(str, FAMILIES))


def test_a_knob_that_comes_and_goes_without_reason_is_refused(write):
    with pytest.raises(UsageError, match="with and without warps"):
        read_recorded(write(conditional([*FAMILIES, {"family": "b", "tile": 2}])))


@pytest.mark.parametrize("cut", ["", "}", ",", ", \n", ', "128,2,7": {"block": 128, "ti'])
def test_a_log_cut_short_keeps_its_whole_entries(write, cut):
    text = json.dumps(CACHE | {"cache": {k: v for k, v in list(CACHE["cache"].items())[:3]}})
    space = read_recorded(write(text.removesuffix("}}") + cut))
    assert space.rows.tolist() == [[0, 0, 0], [1, 0, 0], [1, 1, 0]]


@pytest.mark.parametrize("content", [CACHE, T4], ids=["cache", "T4"])
def test_a_file_cut_anywhere_behind_its_first_entry_keeps_those_that_are_whole(write, content):
    text, entries = json.dumps(content), content.get("results") or content["cache"].values()
    ends = [text.index(json.dumps(entry)) + len(json.dumps(entry)) for entry in entries]
    for cut in range(ends[0], len(text)):
        assert len(read_recorded(write(text[:cut]))) == sum(end <= cut for end in ends), text[:cut]


def test_an_archive_cut_short_keeps_what_is_in_it(write):
    entries = {f"{i}": {"block": i, "tile": 1, "n": 7, "time": float(i)} for i in range(1, 3000)}
    domains = CACHE["tune_params"] | {"block": list(range(1, 3000))}
    path = write(CACHE | {"tune_params": domains, "cache": entries}, "space.json.gz")
    path.write_bytes(path.read_bytes()[:-500])
    assert 1000 < len(read_recorded(path)) < 2999


def test_a_file_that_is_wrong_before_its_end_is_not_taken_for_one_cut_short(write):
    text = json.dumps(CACHE).replace('"tile": 2', '"tile": two', 1)
    with pytest.raises(UsageError, match="must be a JSON object"):
        read_recorded(write(text))


def test_it_is_a_space_like_any_other(write):
    space = read_recorded(write(CACHE))
    config = {"block": 64, "tile": 1, "n": 7}
    assert len(space) == 4
    assert space.contains(config)
    assert not space.contains({"block": 128, "tile": 1, "n": 7})
    assert not space.contains({"block": 64, "tile": 1})
    assert space.decode(space.encode(config)) == config
    assert [tuple(c.values()) for c in space.neighbours(config)] == [(32, 1, 7), (64, 2, 7)]
    assert all(space.contains(c) for c in space.enumerate())
    drawn = {tuple(c.values()) for c in space.sample(np.random.default_rng(0), 100)}
    assert drawn == {tuple(c.values()) for c in space.enumerate()}


def test_a_configuration_that_was_not_recorded_has_no_time(write):
    with pytest.raises(UsageError, match="was not recorded"):
        read_recorded(write(CACHE)).time({"block": 128, "tile": 1, "n": 7})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("no JSON at all", "must be a JSON object"),
        ([1, 2], "must be a JSON object"),
        ({"answer": 42}, "must be a Kernel Tuner cache file or FAIR T4 results"),
        (CACHE | {"cache": {}}, "at least one"),
        (T4 | {"results": []}, "at least one"),
        (CACHE | {"cache": {"32,1,7": {"block": 32, "tile": 1, "n": 7}}}, "without time"),
        (T4 | {"results": [result(32, 1, 2.0) | {"measurements": []}]}, "without time"),
        (T4 | {"results": [estimate(32, 1, 2.0)]}, "has estimated times alone"),
        (T4 | {"results": [estimate(32, 1, 2.0), result(64, 1, None)]}, "has estimated times alone"),
        (CACHE | {"cache": {"64,2,7": CACHE["cache"]["64,2,7"]}}, "at least one must have run"),
        (CACHE | {"tune_params": {"block": [32]}}, "tune_params must give a domain"),
        (CACHE | {"tune_params": CACHE["tune_params"] | {"block": [32, 64]}}, "block must be one of 32, 64, not 128"),
        (T4 | {"metadata": {"timeunit": "fortnights"}}, "timeunit 'fortnights'"),
        (T4 | {"results": [{"measurements": []}]}, "without configuration"),
        (CACHE | {"tune_params_keys": []}, "tune_params must give a domain"),
        (CACHE | {"tune_params_keys": [["block"]]}, "is missing or malformed"),
        (CACHE | {"cache": {"64,1": {"block": 64, "tile": 1, "time": 1.0}}}, "without n"),
        (T4 | {"metadata": None}, "is missing or malformed"),
        (T4 | {"results": [result(32, 1, 2.0) | {"measurements": None}]}, "is missing or malformed"),
        (T4 | {"results": [result(32, 1, 2.0) | {"measurements": [{"value": 1.0}]}]}, "is missing or malformed"),
        (T4 | {"results": [result(32, 1, 2.0), result(32, True, 1.0)]}, "of tile as 1 and as True; it must"),
        (T4 | {"results": [result(32, True, 2.0), result(32, 1, 1.0)]}, "of tile as True and as 1; it must"),
        (CACHE | {"tune_params": CACHE["tune_params"] | {"n": [7.0]}}, "of n as 7.0 and as 7; it must"),
        (T4 | {"results": [result(32, 1, 2.0) | {"configuration": {}}]}, "names no knob"),
        (T4 | {"results": [result([32], 1, 2.0)]}, r"block the value \[32\]"),
        (json.loads(json.dumps(T4).replace('"time"', '"GFLOP/s"')), "without time"),
        ("[" * 100_000, "must be a JSON object"),
        (json.dumps(CACHE).replace("2.0", "9" * 5000), "must be a JSON object"),
        (CACHE | {"cache": {"32,1,7": CACHE["cache"]["32,1,7"] | {"times": ["fast"]}}}, "a sample that is not a time"),
        (T4 | {"results": [result(32, 1, 2.0, [float("nan")])]}, "a sample that is not a time"),
        (T4 | {"results": [result(32, 1, 2.0) | {"times": [1.0]}]}, "is missing or malformed"),
        (CACHE | {"cache": {"32,1,7": CACHE["cache"]["32,1,7"] | {"time": 10**400}}}, "at least one must have run"),
        (T4 | {"results": [result(32, 1, 2.0, [10**400])]}, "a sample that is not a time"),
        (T4 | {"results": [result(float("nan"), 1, 2.0)]}, "block the value nan; it must be a finite number or a text"),
        (T4 | {"results": [result(10**400, 1, 2.0)]}, "it must be a finite number or a text"),
        (CACHE | {"tune_params": CACHE["tune_params"] | {"n": [7, float("inf")]}}, "must be a list of finite numbers"),
        (
            T4 | {"results": [result(i, 1, 2.0) for i in range(2**15 + 1)]},
            "gives block 32,769 values; it may have 32,768",
        ),
    ],
)
def test_a_file_at_fault_is_named_with_the_remedy(write, content, message):
    path = write(content)
    with pytest.raises(UsageError, match=message) as raised:
        read_recorded(path)
    assert str(path) in str(raised.value)


def test_a_missing_file_and_a_broken_archive_are_named(write, tmp_path):
    with pytest.raises(UsageError, match="cannot read"):
        read_recorded(tmp_path / "absent.json")
    broken = write(CACHE, "space.json.gz")
    broken.write_bytes(broken.read_bytes()[:40] + b"\xff" * 99)
    with pytest.raises(UsageError, match="plain or gzipped"):
        read_recorded(broken)
