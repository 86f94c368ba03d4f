"""Products and convolutions whose blocks share the steps of tiles through global memory: in equal parts, or as a stream (stream-K)."""

from __future__ import annotations

import pytest

from evoengine.cuda_files import disassembler
from evoengine.workloads import parse_problem
from evoengine.workloads.gemm.problem import most_sharers, parts
from tests.support.exhaustive import more, planted
from tests.support.kernel_gate import KernelGate

FEW, LINEAR = "gemm:m64,n4096,k8192,bf16,b_nk", "gemm:m256,n4096,k8192,fp16,b_nk,bias"
ALONG_N, BATCH = "gemm:m200,n1040,k4096,fp16,a_km,residual", "gemm:b3,m256,n1024,k4096,bf16"
MMA, EQUAL = {"family": "mma", "stages": 3, "streamed": 40}, {"family": "mma", "split_k": 4}
CONV, ONE_BY_ONE = (
    "conv2d:n2,c40,h15,w17,k72,r3,s5,stride2,pad1,dilation2,bf16,bias_relu",
    "conv2d:n1,c256,h14,w14,k256,r1,s1,fp16",
)
HALVES, QUARTERS = {"split_k": 2}, {"split_k": 4}
WGMMA = {"family": "wgmma", "stream_steps": 64}

LEFT, COUNT = "(long long)share.tile * share.most * LEFT", "arrived + share.tile * (THREADS / 32) + threadIdx.x / 32"
FAULTS = [
    # name, problem, configuration, text of the good kernel, text of the broken one
    ("A of the tile's first steps", FEW, EQUAL, "a += first_k;", ""),
    ("B of the tile's first steps", FEW, MMA, "b += first_k;", ""),
    ("rows of A one short of the block's first step", ALONG_N, EQUAL, "(long long)first_k * m", "(long long)(first_k - 1) * m"),
    ("rows of B of the tile's first steps", ALONG_N, EQUAL, "b += (long long)first_k * n;", ""),
    ("k not shortened by the steps before", LINEAR.replace("8192", "8200"), EQUAL, "k - first_k, tiles", "k, tiles"),
    ("sums of all tiles in the place of the first", FEW, EQUAL, LEFT, "0"),
    ("one count for all warps", FEW, EQUAL, COUNT, "arrived + share.tile"),
    ("one count for all tiles", FEW, EQUAL, COUNT, "arrived + threadIdx.x / 32"),
    ("a count that stays raised", FEW, MMA, "if (before == share.parts - 1) *count = 0;", ""),
    ("counted before all lanes have stored", FEW, EQUAL, "    __syncwarp();\n    int before", "    int before"),
    ("sums read before lane 0 has counted", FEW, EQUAL, "    __syncwarp();  // which orders", "    // which orders"),
    ("counted without an order", FEW, MMA, "atom.add.acq_rel.gpu", "atom.add.relaxed.gpu"),
    ("sums read before all are there", FEW, EQUAL, "if (before != share.parts - 1) return", "if (before != share.parts - 2) return"),
    ("the first block's sums lost", FEW, MMA, "int from = 0;", "int from = 1;"),
    ("the last block's own sums twice", FEW, EQUAL, "acc[i].clear();\n#pragma unroll 1\n    for (int from", "{}\n#pragma unroll 1\n    for (int from"),
    ("buffers filled while another warp reads them", FEW, MMA, "__syncthreads();  // all threads are done with the buffers", ""),
    ("wgmma: a shared tile stored by each of its blocks", LINEAR, WGMMA, "!add_partial_sums(acc, partial, arrived, tile.share())", "false"),
    ("wgmma: a block's last tile not waited for", LINEAR, WGMMA, "if (!tile.is_whole() &&", "if (tile.first_step() > 0 &&"),
    ("wgmma: warps counted together", LINEAR, WGMMA, "* ((128 * CONSUMERS) / 32) + threadIdx.x / 32", "* ((128 * CONSUMERS) / 32)"),
    ("wgmma: the other warpgroup's sums", LINEAR, WGMMA, "__ldcg(of_tile + from * LEFT", "__ldcg(of_tile + (threadIdx.x < 128 ? 128 : -128) + from * LEFT"),
    ("wgmma: sums of a part in the next one's place", LINEAR, WGMMA, "share.part * LEFT", "(share.part + 1) % share.parts * (LEFT - 4)"),
    ("wgmma: tiles loaded from their first step on", LINEAR, WGMMA, "(work.first_step + i) * TILE_K", "i * TILE_K"),
    ("wgmma: a block's steps counted from its tile's begin", LINEAR, WGMMA, "min(steps - first_step(), end - at)", "min(steps, end - at)"),
    ("wgmma: steps behind the last tile", LINEAR, WGMMA, "min(at + STREAM_STEPS, all);", "at + STREAM_STEPS;"),
    ("wgmma: a tile's last block one too far", LINEAR, WGMMA, "((tile() + 1) * steps - 1)", "((tile() + 1) * steps)"),
    ("wgmma: blocks of a batch all of its first entry", BATCH, {"family": "wgmma", "streamed": 20}, "entry = tile() / each", "entry = 0"),
    ("wgmma: room for too few of a tile's blocks", LINEAR, WGMMA, "(steps + STREAM_STEPS - 2) / STREAM_STEPS + 1}", "(steps + STREAM_STEPS - 2) / STREAM_STEPS}"),
    ("wgmma: both blocks of a cluster leave sums in one place", LINEAR, {"family": "wgmma", "cluster": "2x1", "streamed": 24}, "tile() * CLUSTER_BLOCKS + blockIdx.x % CLUSTER_BLOCKS;", "tile() * CLUSTER_BLOCKS;"),
    ("conv2d: windows of the tile's first steps", CONV, HALVES, "m, work.first_step * TILE_K, threadIdx", "m, 0, threadIdx"),
    ("conv2d: filters of the tile's first steps", ONE_BY_ONE, QUARTERS, "b += first_k;", ""),
    ("conv2d: filters behind their last channel", CONV, HALVES, "k - first_k, tiles", "k, tiles"),
    ("conv2d: a step that two blocks do", CONV, HALVES, "part * share + min(part, left)", "part * share"),
    ("conv2d: a last part without the steps that are left over", CONV, HALVES, "share + (part < left)", "share"),
    ("conv2d: sums of the last block lost", ONE_BY_ONE, QUARTERS, "from < share.parts; ++from", "from < share.parts - 1; ++from"),
    ("conv2d: the place of another block's sums", ONE_BY_ONE, QUARTERS, "share.part * LEFT", "share.part / 2 * LEFT"),
    ("conv2d: sums that a warp reads before they are there", ONE_BY_ONE, QUARTERS, "if (before != share.parts - 1) return", "if (before < share.parts - 2) return"),
    ("conv2d: pixels behind the window's read by a tile's last block", ONE_BY_ONE, QUARTERS, "pixel += pixel & 0xffff0000u;", "if (blockIdx.x + 1 < gridDim.x) pixel += pixel & 0xffff0000u;"),
    ("conv2d: the count left as it is", CONV, HALVES, "if (before == share.parts - 1) *count = 0;", ""),
]  # fmt: skip
FAST = ("counted before all lanes", "wgmma: a shared tile")


def found(gate, wanted):
    """The configuration; `streamed` makes a stream of the first one of whole tiles with the other values."""
    if "streamed" not in wanted:
        return gate.configuration(wanted)
    whole = {"stream_steps": 0, **{name: value for name, value in wanted.items() if name != "streamed"}}
    return {**gate.configuration(whole), "stream_steps": wanted["streamed"]}


@planted(("problem", "wanted", "old", "new"), FAULTS, *FAST)
def test_a_planted_fault_is_caught(kernel_gate, problem, wanted, old, new):
    gate = kernel_gate(problem)
    assert gate.refutes(found(gate, wanted), old, new), "the fault escaped"


@pytest.mark.parametrize(
    ("problem", "wanted"),
    [
        (FEW, MMA),
        (LINEAR, WGMMA),
        *more([(CONV, HALVES), (ONE_BY_ONE, QUARTERS), (FEW, EQUAL), (ALONG_N, EQUAL), (BATCH, {"family": "wgmma", "streamed": 20})]),
        *more([(LINEAR, {"family": "wgmma", "cluster": "2x1", "streamed": 24}), (BATCH, {"family": "mma", "streamed": 12})]),
    ],
)  # fmt: skip # a table
def test_the_good_kernel_passes_with_every_cell_visited(kernel_gate, problem, wanted):
    gate = kernel_gate(problem)
    verdict = gate.judge(found(gate, wanted))
    assert verdict.correct, verdict.reason
    assert verdict.coverage is not None and verdict.coverage.missing == ()


DRAWN = [
    (FEW, "h100"), (LINEAR, "h100"), (ALONG_N, "a100"), (BATCH, "h100"), ("gemm:m100,n520,k4104,bf16,bias_gelu", "a10"),
    ("gemm:m300,n777,k3001,fp16,bias", "b200"), ("gemm:m128,n1024,k8192,fp8_e4m3,b_nk,row_scales", "l4"),
    ("gemm:m256,n1024,k8192,fp8_e4m3,b_nk,block_scales", "h100"), ("gemm:m60,n1040,k2048,bf16,b_nk,swiglu", "h100"),
    (CONV, "l4"), (ONE_BY_ONE, "a100"), ("conv2d:n2,c3,h32,w30,k64,r7,s7,stride2,pad3,fp16,residual", "b200"),
]  # fmt: skip # a list


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", range(36))
def test_a_valid_configuration_passes(kernel_gate, number):
    gate = kernel_gate(*DRAWN[number % len(DRAWN)])
    drawn = gate.draw(200, seed=number)
    config = next(c for c in drawn if c.get("stream_steps") or (c.get("split_k", 1) > 1 and c["family"] == "mma"))
    verdict = gate.judge(config, seed=number)
    assert verdict.outcome is None, f"{gate.problem} {config}: {verdict.reason}"


@pytest.mark.skipif(disassembler() is None, reason="needs nvdisasm")
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("gpu", "problem", "wanted"),
    [("h100", LINEAR, WGMMA), ("h100", FEW, MMA), ("a100", FEW, EQUAL), ("a100", CONV, HALVES)],
)
def test_the_kernel_is_right_as_machine_code(gpu, problem, wanted):
    gate = KernelGate(problem, gpu)
    verdict = gate.judge_binary(found(gate, wanted))
    assert verdict.correct, verdict.reason


def test_a_stream_deals_out_every_step_once_and_no_tile_to_more_blocks_than_there_is_room_for():
    _, problem = parse_problem("gemm:m200,n300,k1000,fp16")
    for each in range(1, 40):
        config = {"tile_m": 64, "tile_n": 128, "tile_k": 64, "stream_steps": each}
        tiles, steps = 4 * 3, 16
        blocks = [list(parts(problem, config, block)) for block in range(-(-tiles * steps // each))]
        assert sum(map(sum, blocks)) == tiles * steps
        owners = [block for block, of in enumerate(blocks) for own in of for _ in range(own)]
        of_tile = [len(set(owners[tile * steps : (tile + 1) * steps])) for tile in range(tiles)]
        assert max(of_tile) <= most_sharers(problem, config)
