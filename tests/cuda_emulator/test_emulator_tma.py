"""TMA and bulk copies against NumPy: boxes, bounds, swizzles; late, and only when they are waited for."""

from __future__ import annotations

import numpy as np
import pytest

from evoengine.devices.base import KernelCrashed, KernelHung, KernelUnbuildable, TensorMapArgument
from evoengine.records import Launch, Source
from evoengine.stages.compile import compile_source
from tests.support.exhaustive import more
from tests.support.tma_kernels import VOCABULARY, load, load_text, store, store_text, swizzled, tensor, tile, view

SEEDS = (0, 1)


@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize("seed", [0, *more([1])])
def test_a_box_arrives_swizzled_as_its_map_says(emulate, swizzle, seed):
    a, box = tensor(40, 128), (24, swizzle // 2 or 64)
    o = load(emulate, a, view(a.shape, box, swizzle), seed, AT="64, 8")
    np.testing.assert_array_equal(o, swizzled(tile(a, (8, 64), box), swizzle))


@pytest.mark.parametrize("at", [(37, 0), (8, -8), *more([((0, 0),), ((-3, 0),), ((8, 104),), ((50, 0),)])])
def test_what_lies_outside_of_the_tensor_arrives_as_zeros(emulate, at):
    a, box = tensor(40, 128), (16, 64)
    o = load(emulate, a, view(a.shape, box, 128), AT=f"{at[1]}, {at[0]}")
    np.testing.assert_array_equal(o, swizzled(tile(a, at, box), 128))


def test_a_box_that_begins_at_no_multiple_of_16_bytes_of_a_row_is_refused(emulate):
    """As hardware does, by an illegal instruction."""
    a = tensor(40, 128)
    with pytest.raises(
        KernelCrashed, match=r"a TMA load at line \d+: its box begins 72 bytes into a row, .* multiple of 16"
    ):
        load(emulate, a, view(a.shape, (16, 64)), AT="36, 0")


@pytest.mark.parametrize(
    ("shape", "at", "box"), [((3, 20, 64), (2, 10, 0), (1, 16, 64)), ((2, 3, 9, 64), (1, 2, 5, 32), (1, 1, 8, 32))]
)
def test_boxes_of_more_dimensions_do_not_run_from_one_into_the_next(emulate, shape, at, box):
    a = tensor(*shape)
    o = load(emulate, a, view(shape, box), AT=", ".join(map(str, at[::-1])))
    np.testing.assert_array_equal(o, tile(a, at, box).ravel())


def test_a_map_may_show_less_than_the_tensor_and_in_other_strides(emulate):
    a = tensor(40, 128)
    every_other = TensorMapArgument("map", "a", "fp16", (96, 20), (512,), (64, 8), 0)
    o = load(emulate, a, every_other, AT="64, 16")
    np.testing.assert_array_equal(o, tile(a[::2, :96], (16, 64), (8, 64)).ravel())


@pytest.mark.parametrize("seed", SEEDS)
def test_bytes_that_nobody_waits_for_end_the_kernel(emulate, seed):
    a = tensor(40, 128)
    for wait in ("", "barrier_wait(full, 1);"):
        with pytest.raises(
            KernelCrashed, match=r"ended with 1024 bytes in flight to shared address 1024, for which no thread"
        ):
            load(emulate, a, view(a.shape, (8, 64)), seed, WAIT=wait)


def test_bytes_land_at_once_or_when_they_are_waited_for(emulate):
    a = tensor(40, 128)
    right = load(emulate, a, view(a.shape, (8, 64)))
    early = set()
    for seed in range(24):
        seen = load(emulate, a, view(a.shape, (8, 64)), seed, WAIT="if (threadIdx.x < 32) barrier_wait(full, 0);")
        same = (seen == right).reshape(-1, 64)
        assert same[:, :32].all()  # what the threads that waited copied
        early.add(bool(same.all()))
    assert early == {False, True}


def test_a_wait_for_other_bytes_than_come_is_a_hang_that_counts_them(emulate):
    a = tensor(40, 128)
    with pytest.raises(KernelHung, match=r"phase 0 \(parity 0\) lacks 0 of 1 arrivals and 16 bytes"):
        load(emulate, a, view(a.shape, (8, 64)), EXTRA="+ 16")


def test_a_barrier_that_tma_does_not_know_yet_is_named(emulate):
    a = tensor(40, 128)
    with pytest.raises(
        KernelCrashed, match=r"a TMA load at line \d+: no fence.mbarrier_init or fence.proxy.async has come"
    ):
        load(emulate, a, view(a.shape, (8, 64)), INIT_FENCE="")


def test_stores_that_a_box_overwrites_must_be_fenced_too(emulate):
    a = tensor(40, 128)
    expect = "arrive_expect_tx(full, 2 * count );"
    stored = load_text().replace(expect, f"tile[9] = 1; FENCE {expect}")
    assert stored != load_text()
    arguments = (a, view(a.shape, (8, 64)), np.zeros(512, np.uint16), np.int32(512))
    fenced = emulate(stored.replace("FENCE", "async_proxy_fence();"), *arguments, threads=64, shared=1024)["o"]
    np.testing.assert_array_equal(fenced, tile(a, (0, 0), (8, 64)).ravel())
    with pytest.raises(KernelCrashed, match=r"a TMA load at line \d+ writes shared memory at offset 18, which a store"):
        emulate(stored.replace("FENCE", ""), *arguments, threads=64, shared=1024)


def test_a_map_that_is_not_the_launchs_own_is_named(emulate):
    a = tensor(40, 128)
    bad = load_text().replace(
        "tma_load(shared_address(tile), map,", "TensorMap copy = {}; tma_load(shared_address(tile), copy,"
    )
    with pytest.raises(KernelCrashed, match=r"a TMA load at line \d+: there is no tensor map at its address"):
        emulate(bad, a, view(a.shape, (8, 64)), np.zeros(512, np.uint16), np.int32(512), threads=64, shared=1024)
    with pytest.raises(KernelCrashed, match="3 coordinates for a tensor map of 2"):
        load(emulate, a, view(a.shape, (8, 64)), AT="0, 0, 0")


def test_a_map_by_plain_value_is_refused(emulate):
    a = tensor(40, 128)
    with pytest.raises(KernelUnbuildable, match=r"tensor map map must be a const __grid_constant__ parameter"):
        emulate(
            load_text().replace("__grid_constant__", ""),
            a,
            view(a.shape, (8, 64)),
            np.zeros(512, np.uint16),
            np.int32(512),
        )


@pytest.mark.parametrize("swizzle", [64, *more([0, 128])])
@pytest.mark.parametrize("at", [(8, 64), (30, 64), (-2, 0), (0, 104)])
def test_a_store_writes_what_lies_inside_and_nothing_else(emulate, swizzle, at):
    box, shape = (16, swizzle // 2 or 64), (40, 128)
    rows = tensor(*box)
    o = store(emulate, swizzled(rows, swizzle), shape, view(shape, box, swizzle, tensor="o"), AT=f"{at[1]}, {at[0]}")
    padded = np.zeros((96, 256), np.uint16)
    padded[at[0] + 16 : at[0] + 32, at[1] + 64 : at[1] + 64 + box[1]] = rows
    np.testing.assert_array_equal(o, padded[16:56, 64:192])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"PROXY": ""},
            r"a TMA store at line \d+ reads shared memory at offset \d+, which a store .* without a fence.proxy",
        ),
        ({"EARLY": "tile[9] ^= 1;"}, r"a TMA store at line \d+ reads shared memory at offset 18, .* or too early"),
        ({"WAIT": ""}, r"the thread ended without cp.async.bulk.commit_group and wait_group for its store at line \d+"),
        ({"COMMIT": ""}, r"the thread ended without cp.async.bulk.commit_group and wait_group"),
    ],
)
def test_a_store_that_is_not_fenced_committed_and_waited_for_is_named(emulate, changes, message):
    """In one of a few schedules: in half of them a store is over before anything can change what it reads."""
    image = tensor(16, 64).ravel()
    with pytest.raises(KernelCrashed, match=message):
        for seed in range(8):
            store(emulate, image, (40, 128), view((40, 128), (16, 64), tensor="o"), seed, **changes)


def test_a_store_into_an_input_is_a_crash(emulate):
    text = store_text().replace("unsigned short* o", "const unsigned short* o")
    arguments = (tensor(1024), np.zeros((40, 128), np.uint16), view((40, 128), (16, 64), tensor="o"), np.int32(1024))
    with pytest.raises(KernelCrashed, match="write to read-only input o"):
        emulate(text, *arguments, threads=64, shared=2048)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"swizzle": 48}, "a swizzle of 48 bytes"),
        ({"box": (64, 257)}, "a box of 257 elements"),
        ({"box": (60, 8)}, "a box of 120 bytes along the innermost dim, which must be a multiple of 16"),
        ({"box": (128, 8), "swizzle": 128}, "a box of 256 bytes along the innermost dim, which must be the 128"),
        ({"strides_bytes": (264,)}, "a stride of 264 bytes, which must be a multiple of 16"),
        ({"strides_bytes": ()}, "it takes n, n and n - 1"),
        ({"dims": (128, 41)}, "reaches 10496 bytes into tensor a of 10240"),
        ({"dims": (128, 0)}, "a dim of 0"),
        ({"dtype": "fp8"}, "dtype 'fp8', which must be one of uint8, uint16, uint32, .*, fp16, fp32, fp64, bf16"),
    ],
)
def test_a_map_that_the_driver_would_refuse_is_refused(emulate, changes, message):
    good = {"dims": (128, 40), "strides_bytes": (256,), "box": (64, 8), "swizzle": 0, "dtype": "fp16"}
    bad = TensorMapArgument("map", "a", **{**good, **changes})
    with pytest.raises(KernelUnbuildable, match=f"tensor map map: .*{message}"):
        emulate(load_text(), tensor(40, 128), bad, np.zeros(512, np.uint16), np.int32(512), threads=64, shared=1024)


BULK = """
extern "C" __global__ void f(const float* a, float* o) {
    __shared__ unsigned long long barriers[1];
    extern __shared__ __align__(16) float tile[];
    unsigned full = shared_address(barriers), to = shared_address(tile);
    if (threadIdx.x == 0) {
        barrier_init(full, 1);
        barrier_init_fence();
        arrive_expect_tx(full, 512);
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                     :: "r"(to), "l"(a + 0), "r"(512), "r"(full) : "memory");
    }
    __syncthreads();
    barrier_wait(full, 0);
    tile[4 * threadIdx.x] += 1.0f;
    PROXY
    __syncthreads();
    if (threadIdx.x == 5) {
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                     :: "l"(o), "r"(to), "r"(512) : "memory");
        tma_store_commit();
        asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    }
}
"""


def bulk_text(proxy="async_proxy_fence();"):
    return VOCABULARY + BULK.replace("PROXY", proxy)


def test_plain_blocks_go_both_ways(emulate):
    a = np.arange(128, dtype=np.float32)
    text = bulk_text()
    o = emulate(text, a, np.zeros(128, np.float32), threads=32, shared=512)["o"]
    np.testing.assert_array_equal(o, a + (np.arange(128) % 4 == 0))
    with pytest.raises(KernelCrashed, match="a bulk store .* without a fence.proxy.async"):
        emulate(bulk_text(""), a, a.copy(), threads=32, shared=512)
    with pytest.raises(KernelCrashed, match="misaligned cp.async.bulk at line .*: the global address"):
        emulate(text.replace("a + 0", "a + 1"), a, a.copy(), threads=32, shared=512)
    with pytest.raises(KernelCrashed, match="out-of-bounds read of a"):
        emulate(text.replace("a + 0", "a + 4096"), a, a.copy(), threads=32, shared=512)


ADD = """
extern "C" __global__ void f(float* o, const float* a) {
    extern __shared__ __align__(16) float tile[];
    for (int i = threadIdx.x; i < 128; i += 32) tile[i] = a[i];
    PROXY
    __syncwarp();
    if (threadIdx.x == 3) {
        asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;"
                     :: "l"(o + AT), "r"(shared_address(tile)), "r"(512) : "memory");
        tma_store_commit();
        WAIT
    }
}
"""


def add_text(proxy="async_proxy_fence();", wait='asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");', at="0"):
    return VOCABULARY + ADD.replace("PROXY", proxy).replace("WAIT", wait).replace("AT", at)


@pytest.mark.parametrize("seed", [0, *more([1, 2])])
def test_blocks_add_floats_to_the_same_place(emulate, seed):
    a = np.arange(128, dtype=np.float32)
    o = emulate(add_text(), np.zeros(128, np.float32), a, grid=(5, 1, 1), threads=32, shared=512, seed=seed)["o"]
    np.testing.assert_array_equal(o, 5 * a)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"proxy": ""}, "a bulk addition .* without a fence.proxy.async"),
        ({"wait": ""}, "the thread ended without cp.async.bulk.commit_group and wait_group"),
        ({"at": "1"}, "misaligned cp.reduce.async.bulk at line .*: the global address"),
    ],
)
def test_a_wrong_bulk_addition_is_named(emulate, wrong, said):
    with pytest.raises(KernelCrashed, match=said):
        emulate(add_text(**wrong), np.zeros(128, np.float32), np.zeros(128, np.float32), threads=32, shared=512)


@pytest.mark.parametrize(
    "text",
    [
        bulk_text(),
        add_text(),
        *more(text(**at) for text in (load_text, store_text) for at in ({}, {"AT": "0, 0, 0"}, {"AT": "0, 0, 0, 0"})),
    ],
)
def test_the_instructions_are_spelt_as_the_real_compiler_takes_them(text):
    mix = compile_source(Source(text, "f", Launch((1, 1, 1), 64, 0)), "sm_90a").mix
    assert any(name.startswith("UTMA") or name.startswith("UBLK") for name in mix) or not mix


FENCED = """
extern "C" __global__ void f(unsigned* count, float* o) {
    extern __shared__ __align__(128) float staged[];
    for (int step = 0; step < 8 + blockIdx.x % 3; ++step) {
        if (threadIdx.x == 0) {
            for (int i = 0; i < 64; ++i) staged[i] = step + i;
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
            asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 256;"
                :: "l"(o + 64 * blockIdx.x), "r"((unsigned)__cvta_generic_to_shared(staged)) : "memory");
            asm volatile("cp.async.bulk.commit_group;" ::: "memory");
            asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
        }
        __syncthreads();
    }
    atomicAdd(count, 1u);
}
"""


@pytest.mark.parametrize("seed", [1, 2, 6])
def test_a_fence_counts_whatever_blocks_begin_beside_it(emulate, seed):
    """Of 96 blocks, several run side by side, and others begin where one has ended, in the middle of a round."""
    count, o = np.zeros(1, np.uint32), np.zeros((96, 64), np.float32)
    found = emulate(FENCED, count, o, grid=(96, 1, 1), threads=64, shared=256, seed=seed)
    last = 7 + np.arange(96)[:, None] % 3
    np.testing.assert_array_equal(found["o"], last + np.arange(64))
    assert found["count"] == 96 * 64
