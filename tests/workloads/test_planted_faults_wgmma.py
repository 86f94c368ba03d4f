"""Faults of asynchronous kernels, one each in a right one of the wgmma family, all caught by the gate on the
emulator."""

from __future__ import annotations

import pytest

from evoengine.records import Outcome
from tests.support.exhaustive import more, representatives

PLAIN = "b2,h4,s256,d64,fp16"
WIDE = "b1,h2,s256,d128,fp16"
UNLIKE = "b1,h4,s256,d192,dv128,fp16,kv2"
CAUSAL_GROUPED = "b2,h8,s256,d64,bf16,causal,kv2"
# with more tiles of rows than run at once, as the schedules want them
MANY = "b8,h64,s256,d64,fp16"
MANY_CAUSAL = "b8,h64,s256,d64,bf16,causal,kv32"
SERIAL = {"overlap": False, "ping_pong": False, "tile_m": 192, "load": "cp_async"}
BESIDE = {"overlap": True, "ping_pong": True, "tile_m": 128, "tile_n": 128, "load": "cp_async"}
SHARED_P = {**BESIDE, "p_in": "shared"}
LATENT = {**BESIDE, "o_store": "direct"}
POLYNOMIAL = {**BESIDE, "exp2_on_fma": 0.5}
BY_BITS = {**BESIDE, "max_by": "bits"}
TMA = {**BESIDE, "load": "tma"}
TMA_STORE = {**TMA, "o_store": "tma"}
TMA_SHARED_P = {**SHARED_P, "load": "tma"}
BOTH = (SERIAL, BESIDE)
ROUND = {**TMA, "schedule": "static"}
ROUND_DIRECT = {**ROUND, "o_store": "direct"}
ROUND_TMA_STORE = {**ROUND, "o_store": "tma"}
ROUND_SERIAL = {**SERIAL, "ping_pong": True, "schedule": "static"}
ROUNDS = (ROUND, ROUND_SERIAL)
PAIRED = {**TMA, "cluster": 2}
PAIRED_SERIAL = {**SERIAL, "load": "tma", "cluster": 2}
PAIRS = (PAIRED, PAIRED_SERIAL)
NARROW = {**TMA, "tile_m": 192, "tile_n": 64}
NARROW_APART = {**NARROW, "ping_pong": False}
NARROW_SERIAL = {**NARROW, "overlap": False}
SORTED = {**TMA, "schedule": "longest_first"}

FAULTS = [
    # name, configurations, problem, text of the good kernel, text of the broken one
    ("wrong stride in a descriptor", BOTH, PLAIN, "0, 8 * SLAB_BYTES)", "0, 4 * SLAB_BYTES)"),
    ("wrong slab stride in V's descriptor", BOTH, WIDE, "(tile), ROWS * SLAB_BYTES,", "(tile), ROWS * SLAB_BYTES / 2,"),
    ("tiles not swizzled", BOTH, PLAIN, "return i ^ i / 8 % CHUNKS;", "return i;"),
    ("swizzle one row off", BOTH, PLAIN, "return i ^ i / 8 % CHUNKS;", "return i ^ (i / 8 + 1) % CHUNKS;"),
    ("wrong step along k in Q K^T", BOTH, PLAIN, "step * 2 % CHUNKS", "step * 4 % CHUNKS"),
    ("wrong slab of K", BOTH, WIDE, "TileK::k_major(", "SharedTile<TILE_N / 2, HEAD_DIM>::k_major("),
    ("wrong step along k in P V", BOTH, PLAIN, "step * 16 * CHUNKS", "step * 8 * CHUNKS"),
    ("V not transposed", BOTH, PLAIN, "TRANSPOSED = true", "TRANSPOSED = false"),
    ("all warpgroups multiply the first rows of Q", BOTH, PLAIN, "(tiles.q.tile(0), tiles.consumer * 64)", "(tiles.q.tile(0), 0)"),
    ("Q K^T adds to the scores before", BOTH, PLAIN, "step > 0 ? 1 : accumulate", "1"),
    ("weights packed in the wrong order", BOTH, PLAIN, "pack(d[2 * j], d[2 * j + 1])", "pack(d[2 * j + 1], d[2 * j])"),
    ("missing proxy fence after cp.async", BOTH, PLAIN, "        if (!BY_TMA) async_proxy_fence();\n", ""),
    ("missing proxy fence after weights are stored", [TMA_SHARED_P], PLAIN, "    async_proxy_fence();\n    __syncwarp();\n}", "    __syncwarp();\n}"),
    ("ordinary arrival where copies are in flight", BOTH, PLAIN, "copy_async_arrive(full_of(i));", "barrier_arrive(full_of(i));"),
    ("full barrier's parity off by one", BOTH, PLAIN, "barrier_wait(full_of(i), phase(i) % 2)", "barrier_wait(full_of(i), (phase(i) + 1) % 2)"),
    ("empty barrier's parity off by one", BOTH, PLAIN, "phase(i) % 2 ^ 1", "phase(i) % 2"),
    ("empty barrier never waited for", BOTH, PLAIN, "barrier_wait(empty_of(i), phase(i) % 2 ^ 1);", ";"),
    ("empty barrier of K never waited for", [TMA], PLAIN, "tiles.k.acquire(tile);", "arrive_expect_tx(tiles.k.full_of(tile), TileK::BYTES);"),
    ("K and V swapped", [TMA], PLAIN, "(tiles.v, map_v, tile)", "(tiles.v, map_k, tile)"),
    ("place of V given back before it is read", [TMA], PLAIN, "wait_for<0>(o);\n        tiles.v.release(tile - 1);", "tiles.v.release(tile - 1);\n        wait_for<0>(o);"),
    ("V read before it arrived", [TMA], PLAIN, "tiles.v.wait(tile - 1);", ""),
    ("empty barrier counts too few", BOTH, PLAIN, "v.init(4 * CONSUMERS)", "v.init(4 * CONSUMERS - 4)"),
    ("empty barrier counts too many", BOTH, PLAIN, "v.init(4 * CONSUMERS)", "v.init(4 * CONSUMERS + 1)"),
    ("K read before it arrived", [SERIAL], PLAIN, "tiles.k.wait(tile);", ""),
    ("K read before it arrived", [BESIDE], PLAIN, "if (tile + 1 < seen) tiles.k.wait(tile + 1);", ""),
    ("second K read before it arrived", [BESIDE, TMA], PLAIN, "        if (seen > 1) tiles.k.wait(1);\n", ""),
    ("V read before it arrived", [SERIAL], PLAIN, "tiles.v.wait(tile);", ""),
    ("V read before it arrived", [BESIDE], PLAIN, "tiles.v.wait(tile - 1);", ""),
    ("Q read before it arrived", [TMA], PLAIN, "    tiles.q.wait(0);\n", ""),
    ("place of K given back before it is read", [SERIAL], PLAIN, "wait_for<0>(s);\n        tiles.k.release(tile);", "tiles.k.release(tile);\n        wait_for<0>(s);"),
    ("place of K given back before it is read", [BESIDE], PLAIN, "wait_for<1>(s);\n        tiles.k.release(tile);", "tiles.k.release(tile);\n        wait_for<1>(s);"),
    ("place of V given back before it is read", [SERIAL], PLAIN, "wait_for<0>(o);\n        tiles.v.release(tile);", "tiles.v.release(tile);\n        wait_for<0>(o);"),
    ("place of V given back before it is read", [BESIDE], PLAIN, "        update_max(s, rows, rescale, scale);\n        if (tile", "        tiles.v.release(tile - 1);\n        update_max(s, rows, rescale, scale);\n        if (tile"),
    ("V read before it arrived", [{**BESIDE, "v_ahead": True}], PLAIN, "        tiles.v.wait(tile);\n        exponentiate", "        exponentiate"),
    ("a tile too few for a warpgroup", [NARROW, NARROW_SERIAL], CAUSAL_GROUPED, "(work.visible(first_row + 63, 0) + TILE_N - 1) / TILE_N", "work.visible(first_row + 63, 0) / TILE_N"),
    ("tiles of the first warpgroup for all", [NARROW, NARROW_SERIAL], CAUSAL_GROUPED, "int first_row = tiles.consumer * 64;", "int first_row = 0;"),
    ("a tile too few masked", [NARROW, NARROW_SERIAL], CAUSAL_GROUPED, "whole = work.visible(first_row, 0) / TILE_N;", "whole = work.visible(first_row, 0) / TILE_N + 1;"),
    ("tiles that a warpgroup skips not handed on", [NARROW, NARROW_SERIAL], CAUSAL_GROUPED, "        skip_rest();\n", ""),
    ("turns of skipped tiles not taken", [NARROW], CAUSAL_GROUPED, "            turn.sync();\n            turn.arrive();\n", ""),
    ("V of skipped tiles given back before it arrived", [NARROW_APART], CAUSAL_GROUPED, "            tiles.v.wait(tile);\n            tiles.v.release(tile);\n", "            tiles.v.release(tile);\n"),
    ("place never given back", BOTH, PLAIN, "if (lane() == 0) barrier_arrive(empty_of", "if (lane() == 0 && i > 0) barrier_arrive(empty_of"),
    ("missing wgmma.fence before Q K^T", BOTH, PLAIN, "    wgmma_fence();\n#pragma", "    if (B::TRANSPOSED) wgmma_fence();\n#pragma"),
    ("missing wgmma.fence before P V", BOTH, PLAIN, "    wgmma_fence();\n#pragma", "    if (!B::TRANSPOSED) wgmma_fence();\n#pragma"),
    ("scores used before wgmma is done", [SERIAL], PLAIN, "wait_for<0>(s);", ""),
    ("scores used before wgmma is done", [BESIDE], PLAIN, "wait_for<1>(s);", "warpgroup_fence_operand(s.d);"),
    ("scores waited for too laxly", [BESIDE], PLAIN, "wait_for<1>(s);", "wait_for<2>(s);"),
    ("outputs used before wgmma is done", [BESIDE], PLAIN, "wait_for<0>(o);\n        tiles.v.release(tile - 1);", "tiles.v.release(tile - 1);"),
    ("products never committed", BOTH, PLAIN, "    wgmma_commit();\n", ""),
    ("more registers asked for than there are", BOTH, PLAIN, "warpgroup_reg_alloc<CONSUMER_REGISTERS>", "warpgroup_reg_alloc<CONSUMER_REGISTERS + 8>"),
    ("registers never given up", BOTH, PLAIN, "        warpgroup_reg_dealloc<PRODUCER_REGISTERS>();\n", ""),
    ("a turn that never ends", [BESIDE], PLAIN, "        turn.arrive();\n", ""),
    ("the first turn is nobody's", [BESIDE], PLAIN, "if (next == FIRST) arrive();", ""),
    ("O not rescaled when the maximum moves", BOTH, PLAIN, "        rescale_o(o, rescale);\n", ""),
    ("sum not rescaled when the maximum moves", BOTH, PLAIN, "row_sum *= factor;", ""),
    ("maximum of a quarter of the row", BOTH, PLAIN, "lanes_max<LANES>(tile_max)", "lanes_max<1>(tile_max)"),
    ("sum of a quarter of the row", BOTH, PLAIN, "lanes_sum<LANES>(row_sum)", "4.0f * lanes_sum<1>(row_sum)"),
    ("exponents below the smallest not clamped", [POLYNOMIAL], PLAIN, "__saturatef(fmaf(x, scale / RANGE, (offset - LEAST) / RANGE))", "fmaf(x, scale / RANGE, (offset - LEAST) / RANGE)"),
    ("exponents clamped too early", [POLYNOMIAL], PLAIN, "LEAST = -126.0f", "LEAST = -14.0f"),
    ("exponents of the polynomial one off", [POLYNOMIAL], PLAIN, "WHOLE = 12582912.0f + LEAST", "WHOLE = 12582911.0f + LEAST"),
    ("maxima of negative scores by their bits", [BY_BITS], PLAIN, "min(bits[0], bits[1]) < 0", "false"),
    ("maxima of negative scores of one row in two", [BY_BITS], PLAIN, "min(bits[0], bits[1]) < 0", "bits[0] < 0"),
    ("maxima of negative scores of the lower rows", [BY_BITS], CAUSAL_GROUPED, "min(bits[0], bits[1]) < 0", "bits[0] < 0"),
    ("maxima of negative scores of the upper rows", [BY_BITS], CAUSAL_GROUPED, "min(bits[0], bits[1]) < 0", "bits[1] < 0"),
    ("a score left out of a maximum", [BY_BITS], PLAIN, "max(max(top, __float_as_int(d[i])), __float_as_int(d[i + 1]))", "max(top, __float_as_int(d[i]))"),
    ("polynomial of too low a degree", [POLYNOMIAL], PLAIN, "fmaf(fmaf(0.05517167f, f, 0.24261113f), f, 0.69326097f)", "fmaf(0.24261113f, f, 0.69326097f)"),
    ("tail mask one key too far", BOTH, PLAIN, "return limit - tile * TILE_N;", "return limit - tile * TILE_N + 1;"),
    ("masked columns two off", BOTH, PLAIN, "tile) - lane() % 4 * 2;", "tile);"),
    ("too few bytes announced", [TMA], PLAIN, "arrive_expect_tx(full_of(i), BYTES)", "arrive_expect_tx(full_of(i), BYTES / 2)"),
    ("barriers not made known to TMA", [TMA], PLAIN, "        barrier_init_fence();\n", ""),
    ("slabs of a tile in the wrong order", [{**TMA, "tile_n": 80}], WIDE, "map, full, col + slab * CHUNKS * 8, row", "map, full, col + (1 - slab) * CHUNKS * 8, row"),
    ("missing proxy fence before O is stored by TMA", [TMA_STORE], PLAIN, "    async_proxy_fence();\n    tiles.warpgroup_sync();\n    if (threadIdx", "    tiles.warpgroup_sync();\n    if (threadIdx"),
    ("O stored by TMA before all warps have written it", [TMA_STORE], PLAIN, "    async_proxy_fence();\n    tiles.warpgroup_sync();\n    if (threadIdx", "    async_proxy_fence();\n    if (threadIdx"),
    ("store by TMA not waited for", [TMA_STORE], PLAIN, "    tma_store_wait<0>();", "    "),
    ("O of the wrong warpgroup stored", [TMA_STORE], PLAIN, "work.first_row + tiles.consumer * 64, work.head", "work.first_row, work.head"),
    ("the kv head of another batch entry", [TMA], CAUSAL_GROUPED, "head / (heads / kv_heads)", "head % heads / (heads / kv_heads)"),
    ("more registers asked for than two blocks have", [{"tile_m": 64, "min_blocks": 2}], PLAIN, "65536 / (MIN_BLOCKS * THREADS)", "65536 / THREADS"),
    ("read past the end of the tensors", BOTH, PLAIN, "bool exists = row < rows;", "bool exists = row <= rows;"),
    ("write past the end of O", BOTH, PLAIN, "if (row < work.rows) write_vector", "if (row <= work.rows) write_vector"),
    ("phases of K and V begun again for other rows", ROUNDS, MANY, "(before + i) / STAGES", "i / STAGES"),
    ("places of K and V begun again for other rows", ROUNDS, MANY, "(before + i) % STAGES", "i % STAGES"),
    ("tiles of K and V not counted on", ROUNDS, MANY, "k.advance(kv_tiles);", "k.advance(1);"),
    ("phase of Q begun again for other rows", ROUNDS, MANY, "    tiles.q.wait(0);", "    barrier_wait(tiles.q.full, 0);\n    if (!BY_TMA) async_proxy_fence();"),
    ("Q overwritten while it is read", [ROUND_DIRECT, ROUND_SERIAL], MANY, "tiles.q.acquire(0);", "if (BY_TMA) arrive_expect_tx(tiles.q.full, TileQ::BYTES);"),
    ("Q overwrites O on its way out", [ROUND, ROUND_TMA_STORE], MANY, "tiles.q.acquire(0);", "if (BY_TMA) arrive_expect_tx(tiles.q.full, TileQ::BYTES);"),
    ("place of Q given back before O has left it", [ROUND], MANY, "    store_o(work, tiles, consumer.o, map_o);\n", "    tiles.release_q();\n    store_o(work, tiles, consumer.o, map_o);\n    return;\n"),
    ("place of Q given back before O has left it", [ROUND_TMA_STORE], MANY, "    store_o(work, tiles, consumer.o, map_o);\n", "    tiles.release_q();\n    store_o(work, tiles, consumer.o, map_o);\n    return;\n"),
    ("place of Q given back before it is read", [ROUND_DIRECT], MANY, "    tiles.q.wait(0);", "    tiles.q.wait(0);\n    tiles.release_q();"),
    ("place of Q never given back", ROUNDS, MANY, "        q.release(0);\n", ""),
    ("place of the last V never given back", [ROUND], MANY, "        tiles.v.release(seen - 1);", ""),
    ("missing proxy fence between O and the next Q", [ROUND], MANY, "    async_proxy_fence();  // the next Q", "    // the next Q"),
    ("empty barrier of Q counts too few", [ROUND_TMA_STORE], MANY, "q.init(4 * CONSUMERS)", "q.init(4 * CONSUMERS - 4)"),
    ("turns begun again for other rows", ROUNDS, MANY, "            consume(work", "            const WarpSchedulerBarrier barrier(tiles.consumer);\n            consume(work"),
    ("rows of a last round not filled skipped", ROUNDS, MANY, "number < all_heads", "number + int(gridDim.x) - int(blockIdx.x) <= all_heads"),
    ("rows of other batch entries forgotten", [ROUND], MANY, "all_heads = batch * heads;", "all_heads = heads;"),
    ("rounds too far apart", [ROUND], MANY, "number += opaque(gridDim.x);", "number += opaque(gridDim.x) + 1;"),
    ("backward rounds one off", [ROUND], MANY_CAUSAL, "opaque(gridDim.x) - 1 - blockIdx.x", "opaque(gridDim.x) - blockIdx.x"),
    ("longest rows one off", [ROUND, SORTED], MANY_CAUSAL, "row_tiles() - 1 - place / among", "row_tiles() - place / among"),
    ("rows and heads taken for one another", [ROUND, SORTED], MANY_CAUSAL, "row_tiles() - 1 - place / among,\n                        first_head + place % among", "row_tiles() - 1 - place / row_tiles(),\n                        first_head + place % row_tiles()"),
    ("place given back to the own block alone", PAIRS, PLAIN, "if (lane() < CLUSTER) barrier_arrive_at(lane(), ", "if (lane() == 0) barrier_arrive_at(cluster_rank(), "),
    ("place given back twice to the own block", PAIRS, PLAIN, "barrier_arrive_at(lane(), ", "barrier_arrive_at(cluster_rank(), "),
    ("empty barrier counts one block's warps", PAIRS, PLAIN, "MULTICAST ? CLUSTER * consumer_warps", "MULTICAST ? consumer_warps"),
    ("only the block's own half of the bytes announced", PAIRS, PLAIN, "arrive_expect_tx(full_of(i), BYTES)", "arrive_expect_tx(full_of(i), MULTICAST ? BYTES / CLUSTER : BYTES)"),
    ("both blocks bring the same half", PAIRS, PLAIN, "cluster_rank() * (ROWS / CLUSTER)", "0"),
    ("halves change places", PAIRS, PLAIN, "row + first, outer", "row + ROWS / CLUSTER - first, outer"),
    ("halves of other slabs", [PAIRED], WIDE, "(slab * ROWS + first)", "(slab * (ROWS / CLUSTER) + first)"),
    ("half of a tile to the own block alone", PAIRS, PLAIN, "(1 << CLUSTER) - 1", "1 << cluster_rank()"),
    ("other block reached before it has begun", PAIRS, PLAIN, "if (MULTICAST) cluster_sync();\n    else __syncthreads();", "__syncthreads();"),
    ("other block reached after it has ended", PAIRS, PLAIN, "    if (MULTICAST) cluster_sync();  // the other", "    // the other"),
    ("heads of V as far apart as those of K", [LATENT], UNLIKE, "kv_head * seq_k * HEAD_DIM_V", "kv_head * seq_k * HEAD_DIM"),
    ("heads of O as far apart as those of Q", [LATENT, BESIDE], UNLIKE, "first_row) * HEAD_DIM_V", "first_row) * HEAD_DIM"),
    ("tiles of V as far apart as those of K", [LATENT], UNLIKE, "load_kv<TileV, HEAD_DIM_V>", "load_kv<TileV, HEAD_DIM>"),
    ("rows of O as long as those of Q", [LATENT], UNLIKE, "row * HEAD_DIM_V + lane()", "row * HEAD_DIM + lane()"),
    ("rows of O on their way out as long as those of Q", [BESIDE], UNLIKE, "row * HEAD_DIM_V + (slab", "row * HEAD_DIM + (slab"),
    ("as many bytes announced for V as for K", [TMA], UNLIKE, "TileV::BYTES, BY_TMA, MULTICAST>", "TileK::BYTES, BY_TMA, MULTICAST>"),
    ("Q K^T only as deep as V is wide", [LATENT, TMA], UNLIKE, "issue<HEAD_DIM>(s, q", "issue<HEAD_DIM_V>(s, q"),
    ("slabs of O where those of Q lie", [TMA_STORE], UNLIKE, "slab < TileO::SLABS", "slab < TileO::SLABS - 1"),
    ("V loaded from K's map", [TMA], UNLIKE, "(tiles.v, map_v, tile)", "(tiles.v, map_k, tile)"),
    ("causal diagonal one too far", BOTH, CAUSAL_GROUPED, "row + diagonal + 1)", "row + diagonal + 2)"),
    ("causal diagonal hidden", BOTH, CAUSAL_GROUPED, "row + diagonal + 1)", "row + diagonal)"),
    ("causal mask aligned to the upper left", BOTH, CAUSAL_GROUPED, "diagonal = seq_k - seq_q;", "diagonal = 0;"),
    ("wrong kv head of a group", BOTH, CAUSAL_GROUPED, "head / (heads / kv_heads)", "head % kv_heads"),
]  # fmt: skip


def title(config):
    return "-".join(f"{knob}={value}" for knob, value in config.items() if knob != "tile_n")


PLANTED = [
    pytest.param(config, problem, old, new, id=f"{name}-{title(config)}")
    for name, configs, problem, old, new in FAULTS
    for config in configs
]


def variant(gate, wanted):
    """The first start point of the family, moved to the wanted values."""
    config = {**gate.start({"family": "wgmma"}), **wanted}
    inactive = {"ping_pong"} if config["tile_m"] == 64 else set()
    inactive |= {"cluster"} if config["load"] != "tma" else set()
    inactive |= set() if config["overlap"] else {"pv_wait", "v_ahead"}
    config = {knob: value for knob, value in config.items() if knob not in inactive}
    assert gate.space.why_invalid(config) is None
    return config


# one fault of each class; the others of a class run with `make test-all`
FAST = (
    "tiles not swizzled",
    "missing proxy fence after cp.async",
    "full barrier's parity off by one",
    "missing wgmma.fence before Q K^T",
    "more registers asked for than there are",
    "store by TMA not waited for",
)


@pytest.mark.parametrize(("config", "problem", "old", "new"), representatives(PLANTED, *FAST))
def test_a_planted_fault_is_caught(attention_gate, config, problem, old, new):
    gate = attention_gate(problem)
    config = variant(gate, config)
    found = gate.judge(config, gate.doctored(config, old, new))
    assert found.outcome in (Outcome.INCORRECT, Outcome.CRASHED, Outcome.HUNG), "the fault escaped"
    assert found.reason


@pytest.mark.parametrize("problem", [PLAIN, *more([CAUSAL_GROUPED, WIDE])])
@pytest.mark.parametrize(
    "config", [SERIAL, *more([TMA_STORE, BY_BITS, BESIDE, SHARED_P, POLYNOMIAL, TMA_SHARED_P])], ids=title
)
def test_the_good_kernel_beside_it_passes(attention_gate, config, problem):
    gate = attention_gate(problem)
    verdict = gate.judge(variant(gate, config))
    assert verdict.outcome is None, verdict.reason


@pytest.mark.parametrize("config", [LATENT, *more([TMA_STORE, BESIDE, {**TMA_SHARED_P, "tile_n": 64}])], ids=title)
def test_the_good_kernel_whose_rows_of_v_are_shorter_passes(attention_gate, config):
    gate = attention_gate(UNLIKE)
    verdict = gate.judge(variant(gate, config))
    assert verdict.outcome is None, verdict.reason


def test_the_good_kernel_that_begins_with_the_longest_rows_passes(attention_gate):
    gate = attention_gate(MANY_CAUSAL)
    verdict = gate.judge(variant(gate, SORTED))
    assert verdict.outcome is None, verdict.reason


@pytest.mark.parametrize("problem", [PLAIN, *more(["b2,h8,s256,d96,bf16,kv2", WIDE])])
@pytest.mark.parametrize("config", [PAIRED, *more([PAIRED_SERIAL, {**PAIRED, "o_store": "tma"}])], ids=title)
def test_the_good_kernel_of_two_blocks_passes(attention_gate, config, problem):
    gate = attention_gate(problem)
    verdict = gate.judge(variant(gate, config))
    assert verdict.outcome is None, verdict.reason


@pytest.mark.parametrize("problem", [MANY_CAUSAL, *more([MANY])])
@pytest.mark.parametrize("config", [ROUND_TMA_STORE, *more([ROUND, ROUND_DIRECT, ROUND_SERIAL])], ids=title)
def test_the_good_kernel_that_goes_round_passes(attention_gate, config, problem):
    gate = attention_gate(problem)
    verdict = gate.judge(variant(gate, config))
    assert verdict.outcome is None, verdict.reason
