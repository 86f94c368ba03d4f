"""Asynchronous copies, transaction barriers and clusters as ptxas writes them, against NumPy, whatever the order that a
seed draws. The kernels are the emulator's, compiled by NVRTC here.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from evoengine.devices.base import KernelCrashed, KernelHung, KernelRaced, TensorArgument, TensorMapArgument
from tests.support.cluster_kernels import READS, multicast, pair
from tests.support.copy_async_kernels import COMMIT, WAIT, WAIT_ALL, copy
from tests.support.exhaustive import more
from tests.support.mbarrier_kernels import SOURCES, one, registers_text, ring
from tests.support.tma_kernels import VOCABULARY, load, store_text, swizzled, tensor, tile, view

SEEDS = range(4)
UNWRITTEN = 0xFFFF


@pytest.fixture(params=["sm_90a", *more(["sm_120a"])])
def execute(execute, request):
    """The shared one, for each generation with TMA, mbarrier and clusters."""
    return partial(execute, arch=request.param)


has_multicast = pytest.mark.parametrize("execute", ["sm_90a"], indirect=True)
"""on sm_120 a function of the driver does it, which is not there"""


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("arch", ["sm_80", *more(["sm_90a"])])
def test_a_committed_copy_has_landed_at_its_wait(execute, arch, seed):
    for commit, wait in ((COMMIT, WAIT), ("", WAIT_ALL)):
        expected, o = copy(execute, commit, wait, seed=seed, arch=arch)
        np.testing.assert_array_equal(o, expected)


def test_a_copy_that_is_not_waited_for_is_a_race_under_every_seed(execute):
    for seed in SEEDS:
        with pytest.raises(KernelCrashed, match="LDS.* which `LDGSTS.* writes: its group was not waited for"):
            copy(execute, COMMIT, "", seed=seed)


@pytest.mark.parametrize("kept", [4, *more([0, 8, 12])])
def test_the_bytes_beyond_the_source_size_are_zero(execute, kept):
    expected, o = copy(execute, COMMIT, WAIT, bytes=kept)
    np.testing.assert_array_equal(o, np.where(np.arange(4) < kept // 4, expected, 0))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("source", SOURCES)
def test_a_ring_of_two_places_passes_all_tiles_on(execute, source, seed):
    assert ring(execute, source, seed)


@pytest.mark.parametrize("fault", [{"RELEASE": ""}, *more([{"PARITY_EMPTY": "t / 2 % 2"}, {"CONSUMERS": "2"}])])
def test_a_ring_that_cannot_go_on_hangs(execute, fault):
    with pytest.raises(KernelHung):
        ring(execute, "tma", **fault)


RING_FAULTS = {
    "not full": {"WAIT_FULL": ""},
    "released by the wrong warp": {"SYNC": ""},
    "released before it is read": {
        "SYNC": "",
        "RELEASE": "",
        "WAIT_FULL": """barrier_wait(full + t % 2 * 8, t / 2 % 2);
        if (threadIdx.x == 32) barrier_arrive(empty + t % 2 * 8);""",
    },
}


@pytest.mark.parametrize("fault", ["not full", "released by the wrong warp", *more(["released before it is read"])])
@pytest.mark.parametrize("source", SOURCES)
def test_a_ring_whose_places_are_not_handed_over_is_a_race_under_every_seed(execute, source, fault):
    for seed in SEEDS:
        with pytest.raises(
            KernelCrashed, match="shared address .*(nothing orders the two|was not waited for)|arrivals"
        ):
            ring(execute, source, seed, **RING_FAULTS[fault])


def test_arrivals_beyond_the_count_and_without_a_barrier_are_named(execute):
    arrive = 'asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], 40;" :: "r"(b) : "memory");'
    with pytest.raises(KernelCrashed, match=r"SYNCS.*40 arrivals where the phase waits for"):
        one(execute, arrive)
    with pytest.raises(KernelCrashed, match=r"SYNCS.*none was initialised there"):
        one(execute, arrive.replace('"r"(b)', '"r"(b + 8)'))


@pytest.mark.parametrize("swizzle", [128, *more([0, 32, 64])])
@pytest.mark.parametrize("at", [(-3, 0), (8, 104), *more([((8, 64),), ((37, 0),), ((50, 0),)])])
def test_a_box_arrives_swizzled_with_zeros_beyond_the_tensor(execute, swizzle, at):
    a, box = tensor(40, 128), (24, swizzle // 2 or 64)
    o = load(execute, a, view(a.shape, box, swizzle), AT=f"{at[1]}, {at[0]}")
    np.testing.assert_array_equal(o, swizzled(tile(a, at, box), swizzle))


@pytest.mark.parametrize("begins", [36, -4])
def test_a_box_that_begins_at_no_multiple_of_16_bytes_of_a_row_is_an_illegal_instruction(execute, begins):
    a = tensor(40, 128)
    with pytest.raises(KernelCrashed, match=rf"UTMALDG.*its box begins {2 * begins} bytes into a row"):
        load(execute, a, view(a.shape, (16, 64)), AT=f"{begins}, 0")


@pytest.mark.parametrize(
    ("shape", "at", "box"),
    [((2, 3, 9, 64), (1, 2, 5, 32), (1, 1, 8, 32)), *more([((3, 20, 64), (2, 10, 0), (1, 16, 64))])],
)
def test_boxes_of_more_dimensions_do_not_run_from_one_into_the_next(execute, shape, at, box):
    a = tensor(*shape)
    o = load(execute, a, view(shape, box), AT=", ".join(map(str, at[::-1])))
    np.testing.assert_array_equal(o, tile(a, at, box).ravel())


def test_a_wait_for_other_bytes_than_come_hangs(execute):
    a = tensor(40, 128)
    with pytest.raises(KernelHung):
        load(execute, a, view(a.shape, (8, 64)), EXTRA="+ 16")


def store(execute, image, shape, tensor_map, seed=0, **changes):
    arguments = (image, np.full(shape, UNWRITTEN, np.uint16), tensor_map, np.int32(image.size))
    return execute(store_text(**changes), *arguments, threads=64, shared=image.nbytes, seed=seed)["o"]


@pytest.mark.parametrize("swizzle", [64, *more([0, 128])])
@pytest.mark.parametrize("at", [(30, 64), (0, 96), *more([((8, 64),), ((-2, 0),)])])
def test_a_store_writes_what_lies_inside_and_nothing_else(execute, swizzle, at):
    box, shape = (16, swizzle // 2 or 64), (40, 128)
    rows = tensor(*box)
    o = store(execute, swizzled(rows, swizzle), shape, view(shape, box, swizzle, tensor="o"), AT=f"{at[1]}, {at[0]}")
    padded = np.full((96, 256), UNWRITTEN, np.uint16)
    padded[at[0] + 16 : at[0] + 32, at[1] + 64 : at[1] + 64 + box[1]] = rows
    np.testing.assert_array_equal(o, padded[16:56, 64:192])


REDUCE = """
extern "C" __global__ void
f(const unsigned char* a, unsigned char* o, const __grid_constant__ TensorMap map, int count) {
    extern __shared__ __align__(1024) unsigned char tile[];
    for (int i = threadIdx.x; i < count; i += 64) tile[i] = a[count * blockIdx.x + i];
    async_proxy_fence();
    __syncthreads();
    if (threadIdx.x == 0) {
        asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.OPERATION.tile.bulk_group [%0, {8, 36}], [%1];"
                     :: "l"(&map), "r"(shared_address(tile)) : "memory");
        tma_store_commit();
        tma_store_wait<0>();
    }
}
"""
COMBINE = {
    "add": np.add, "min": np.minimum, "max": np.maximum, "xor": np.bitwise_xor, "and": np.bitwise_and,
    "inc": lambda old, most: np.where(old >= most, 0, old + 1).astype(old.dtype),
}  # fmt: skip # a table


def combined_tile(execute, operation: str, dtype: str, seed: int = 0):
    """Two blocks' boxes [8, 16] combined with a tensor [40, 16] at (36, 8), of which a half of a half lies inside."""
    kind = np.dtype({"fp16": "f2", "fp32": "f4"}.get(dtype, dtype))
    draw = np.random.default_rng(3)
    o, a = ((draw.integers(0, 50, shape)).astype(kind) for shape in ((40, 16), (2, 8, 16)))
    if operation == "inc":
        a[1] = a[0]  # of unlike ones the order of the blocks would count
    row = 16 * kind.itemsize
    tensor_map = TensorMapArgument("map", "o", dtype, (16, 40), (row,), (16, 8), 0)
    text = VOCABULARY + REDUCE.replace("OPERATION", operation)
    there = TensorArgument("o", o.view(np.uint8).ravel(), output=True, inout=True)
    arguments = (a.view(np.uint8).ravel(), there, tensor_map, np.int32(8 * row))
    found = execute(text, *arguments, threads=64, grid=2, shared=8 * row, seed=seed)["o"]
    expected = o.copy()
    for block in a:
        expected[36:, 8:] = COMBINE[operation](expected[36:, 8:], block[:4, :8])
    return found.view(kind).reshape(o.shape), expected


@pytest.mark.parametrize(
    ("operation", "dtype"),
    [
        *[("add", "fp32"), ("min", "fp16"), ("xor", "uint64")],
        *more([("add", "fp16"), ("max", "int32"), ("inc", "uint32"), ("add", "int64"), ("and", "uint32")]),
    ],
)
def test_tiles_of_several_blocks_are_combined_with_what_is_there(execute, operation, dtype):
    for seed in SEEDS:
        np.testing.assert_array_equal(*combined_tile(execute, operation, dtype, seed))


def test_an_operation_that_elements_of_the_tensor_map_do_not_have_is_named(execute):
    with pytest.raises(KernelCrashed, match=r"UTMAREDG.*MIN.*elements of type 7, which it does not combine"):
        combined_tile(execute, "min", "fp32")


TWICE = """
extern "C" __global__ void
f(const unsigned char* a, unsigned char* o, const __grid_constant__ TensorMap map, int count) {
    extern __shared__ __align__(1024) unsigned char tiles[];
    for (int i = threadIdx.x; i < 2 * count; i += 64) tiles[i] = a[i];
    async_proxy_fence();
    __syncthreads();
    unsigned char* tile = tiles + threadIdx.x / 32 * count;
    if (threadIdx.x % 32 == 0) {
        asm volatile(STORE :: "l"(&map), "r"(shared_address(tile)), "l"(o), "r"(count) : "memory");
        tma_store_commit();
        tma_store_wait<0>();
    }
}
"""
STORES = {
    "UTMASTG": "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {0, 0}], [%1];",
    "UBLKCP": "cp.async.bulk.global.shared::cta.bulk_group [%2], [%1], %3;",
}


@pytest.mark.parametrize(("opcode", "store"), STORES.items())
def test_two_warps_may_store_a_tile_of_the_same_contents_and_none_of_others(execute, opcode, store):
    tile_map = TensorMapArgument("map", "o", "fp16", (16, 8), (32,), (16, 8), 0)
    a = np.tile(np.random.default_rng(5).integers(0, 99, 256, np.uint8), 2)

    def stored(a, seed):
        arguments = (a, np.zeros(256, np.uint8), tile_map, np.int32(256))
        text = VOCABULARY + TWICE.replace("STORE", f'"{store}"')
        return execute(text, *arguments, threads=64, shared=512, seed=seed)["o"]

    for seed in SEEDS:
        np.testing.assert_array_equal(stored(a, seed), a[:256])
    a[-1] += 1
    for seed in SEEDS:
        with pytest.raises(KernelRaced, match=f"{opcode}.*: lane 0 writes byte 240 of o, which `{opcode}"):
            stored(a, seed)


def test_a_store_that_its_block_does_not_wait_for_is_named(execute):
    image, shape = tensor(16, 64).ravel(), (40, 128)
    with pytest.raises(KernelCrashed, match=r"UTMASTG.*: its block has ended without waiting for it"):
        for seed in range(8):  # until it lands late
            store(execute, image, shape, view(shape, (16, 64), tensor="o"), seed, WAIT="")


@has_multicast
@pytest.mark.parametrize("seed", SEEDS)
def test_half_a_tile_from_each_block_makes_a_whole_one_in_both(execute, seed):
    a, o = multicast(execute, seed)
    np.testing.assert_array_equal(o, [a, a])


@has_multicast
def test_bytes_for_a_block_count_at_its_own_barrier_alone(execute):
    with pytest.raises(KernelHung):
        multicast(execute, blocks="(1 << cluster_rank())")
    with pytest.raises(KernelCrashed, match=r"UTMALDG.*: to the blocks of mask 4, of a cluster of 2"):
        multicast(execute, blocks="4")


@pytest.mark.parametrize("seed", SEEDS)
def test_both_blocks_arrive_at_the_barriers_of_both(execute, seed):
    body = "if (threadIdx.x < 2) barrier_arrive_at(threadIdx.x, barrier); barrier_wait(barrier, 0);"
    o = pair(execute, body, seed)
    block, thread = np.divmod(np.arange(512), 128)
    np.testing.assert_array_equal(o, 100 * block + thread)
    with pytest.raises(KernelHung):
        pair(execute, body.replace("threadIdx.x < 2", "threadIdx.x == cluster_rank()"), seed)


def test_a_block_reads_the_others_shared_memory(execute):
    block, thread = np.divmod(np.arange(512), 128)
    np.testing.assert_array_equal(pair(execute, READS), 100 * (block ^ 1) + thread)


def test_a_block_that_may_end_before_others_have_read_its_shared_memory_is_named_under_every_seed(execute):
    reads = """float4 x = read_four_at(1 - cluster_rank(), shared_address(number + threadIdx.x / 4 * 4));
               if (x.x == 1e30f) o[0] = 1;"""
    for seed in SEEDS:
        assert pair(execute, reads, seed).any()
        with pytest.raises(KernelRaced, match=r"block \d of the cluster ends, whose shared memory `LD.* reads in lane"):
            pair(execute, reads, seed, end="")


def test_a_block_that_may_not_have_begun_when_others_reach_it_is_named_under_every_seed(execute):
    reads = """float4 x = read_four_at(1 - cluster_rank(), shared_address(number + threadIdx.x / 4 * 4));
               if (x.x == 1e30f) o[0] = 1;"""
    arrives = "if (threadIdx.x == 0) barrier_arrive_at(1 - cluster_rank(), barrier);"
    for seed in SEEDS:
        for body, does in ((reads, "`LD"), (arrives, "`.*SYNCS.ARRIVE")):
            with pytest.raises(KernelRaced, match=rf"block \d of the cluster may not have begun, whose .* {does}"):
                pair(execute, body, seed, start="__syncthreads();")


RELAXED = """
    asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
"""


def test_a_relaxed_meeting_orders_no_access_before_the_end_of_the_block(execute):
    """As in the emulator. One at which blocks begin, and one behind a fence, are right."""
    fence = 'asm volatile("fence.acq_rel.cluster;" ::: "memory");'
    for seed in SEEDS:
        assert pair(execute, READS, seed, start=RELAXED + "cluster_sync();", end="").any()
        assert pair(execute, READS.replace("cluster_sync();", fence + RELAXED), seed, end="").any()
        with pytest.raises(KernelRaced, match="ends, whose shared memory .*: nothing orders the two"):
            pair(execute, READS.replace("cluster_sync();", RELAXED), seed, end="")


def test_a_cluster_of_which_a_block_does_not_come_hangs(execute):
    with pytest.raises(KernelHung):
        pair(execute, "if (blockIdx.x % 2) cluster_sync(); else barrier_wait(barrier, 0);")


def test_threads_that_have_ended_are_not_waited_for_in_a_cluster(execute):
    assert pair(execute, end="if (threadIdx.x % 3) return; cluster_sync();").any()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('asm volatile("barrier.cluster.arrive.release;"); cluster_sync();', "arrives again before it has waited"),
        ('asm volatile("barrier.cluster.wait.acquire;");', "waits where it has not arrived"),
    ],
)
def test_a_cluster_barrier_used_as_none_can_be_is_named(execute, body, message):
    with pytest.raises(KernelCrashed, match=message):
        pair(execute, body, start="")


@pytest.mark.parametrize("seed", SEEDS)
def test_warpgroups_that_share_what_there_is_all_get_it(execute, seed):
    assert (execute(registers_text(24, 240), np.zeros(384, np.int32), threads=384, seed=seed)["o"] == 1).all()


def test_asking_for_more_registers_than_there_are_hangs(execute):
    with pytest.raises(KernelHung):
        execute(registers_text(40, 240), np.zeros(384, np.int32), threads=384)
