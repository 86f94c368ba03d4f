"""The benchmark of the exported loader's host time: what it times, and that the loader stays cheap."""

from __future__ import annotations

import time

import pytest

from benchmarks import loader as benchmark


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("loader")
    driver = benchmark.build_driver(folder)
    module = benchmark.load(benchmark.KERNELS["4 tensor maps"], folder / "four_maps", driver)
    found = benchmark.measure(module, calls=300)
    return found, benchmark.bare_launch(module, calls=300)


def test_a_repeated_call_costs_no_more_than_a_few_bare_launches(measured):
    """Six, where nothing else keeps the processor busy; a loader that kept nothing took a hundred."""
    found, bare = measured
    assert min(found["the same tensors, out given"]) < 15 * min(bare)


def test_what_is_kept_is_what_makes_it_cheap(measured):
    found, _ = measured
    fastest = {what: min(samples) for what, samples in found.items()}
    assert fastest["the same tensors"] < fastest["new tensors of the same shape"] < fastest["a new shape"]


def test_each_sample_is_the_time_of_one_call():
    begun = time.perf_counter()
    samples = benchmark.microseconds(time.sleep, [(0.002,), (0.02,)])
    assert samples[0] >= 2000 and samples[1] >= 20_000
    assert sum(samples) <= 1e6 * (time.perf_counter() - begun)


def test_the_table_says_that_no_gpu_took_part(measured):
    found, bare = measured
    table = benchmark.show({f"4 tensor maps: {what}": samples for what, samples in found.items()}, min(bare))
    assert "no GPU took part" in table.title and table.row_count == len(found)
