"""Kernels of operators on rows are right, broken ones are not, and a problem's text says what it means or is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from evoengine.errors import UsageError
from evoengine.stages.verify import compare
from evoengine.workloads import parse_problem
from evoengine.workloads.base import Case
from evoengine.workloads.rowwise import OPERATORS, RowwiseProblem
from tests.support.exhaustive import more, planted
from tests.support.machine_code import require_tools

WARP, BLOCK = {"family": "warp"}, {"family": "block"}
CLUSTER = {"family": "cluster"}
AGAIN = {"family": "block", "row_in": "memory"}
TWO, TURNS = {"family": "block", "passes": "two"}, {"family": "block", "turns": 2, "passes": "online"}
RING, RING_OF_CLUSTER = ({"family": name, "row_in": "shared", "turns": 4} for name in ("block", "cluster"))
COLUMNS = {"family": "block", "cluster": 2}
LAYER, RMS, SOFTMAX = (f"rowwise:{name},rows5000,hidden1000,bf16" for name in ("layer_norm", "rms_norm", "softmax"))
ENTROPY = "rowwise:cross_entropy,rows5000,hidden1003,bf16"
ENTROPY_AGAIN, SHORT = "rowwise:cross_entropy,rows5000,hidden1000,bf16", "rowwise:rms_norm,rows5000,hidden640,bf16"
ROPE, SILU = "rowwise:rope,rows500,hidden512,d64,bf16", "rowwise:silu_mul,rows500,hidden1000,bf16"
ODD = "rowwise:softmax,rows77,hidden333,fp16,out_fp32"
SMALL = "rowwise:softmax,rows3,hidden1,fp32"

FAULTS = [
    # name, configuration, problem, text of the good kernel, text of the broken one
    ("sum in place of the mean", LAYER, BLOCK, "return word[1] / COLUMNS;", "return word[1];"),
    ("centre that is not a mean", LAYER, TWO, "return word[0] / COLUMNS; }\n};\n\nstruct Dev", "return word[0]; }\n};\n\nstruct Dev"),
    ("deviations from 0", LAYER, TWO, "float away = x.element[j] - centre;", "float away = x.element[j];"),
    ("shares of unlike counts", LAYER, WARP, "away * away * word[2] * share", "away * away * word[2]"),
    ("eps left out", LAYER, WARP, " + eps", ""),
    ("another eps", LAYER, BLOCK, "+ eps)", "+ 1e-6f)"),
    ("bias left out", LAYER, BLOCK, ", bias.element[j])", ", 0.0f)"),
    ("weight of the first columns", RMS, WARP, "read_run(weight + column_of(i))", "read_run(weight + column_of(0))"),
    ("mean over the padded length", RMS, BLOCK, "word[0] / COLUMNS", "word[0] / (RUNS_PER_THREAD * THREADS_PER_ROW * VECTOR)"),
    ("eps of layer norm", RMS, BLOCK, "+ eps)", "+ 1e-5f)"),
    ("no maximum", SOFTMAX, TWO, ".centre();", ".centre() * 0.0f;"),
    ("maximum of the own columns", SOFTMAX, TWO, "row_sum(middle, 2 * turn).centre()", "middle.centre()"),
    ("sum that does not sink with a new maximum", SOFTMAX, BLOCK, "word[1] *= exp2_approx((word[0] - largest) * LOG2_E);", ""),
    ("sums added as they are", SOFTMAX, WARP, "other.word[1] * exp2_approx((other.word[0] - word[0]) * LOG2_E)", "other.word[1]"),
    ("masked columns subtracted from one another", SOFTMAX, BLOCK, "if (word[0] > MINUS_INFINITY) word[1] += sum_of", "word[1] += sum_of"),
    ("masked lanes subtracted from one another", SOFTMAX, WARP, "if (other.word[0] > MINUS_INFINITY) word[1] +=", "word[1] +="),
    ("powers of 2", SOFTMAX, BLOCK, "LOG2_E = 1.4426950408889634f", "LOG2_E = 1.0f"),
    ("last columns left out", SOFTMAX, AGAIN, "if (column_of(first + j) < COLUMNS) sum", "if (column_of(first + j) < COLUMNS - VECTOR) sum"),
    ("missing barrier", SOFTMAX, BLOCK, "__syncthreads();", ""),
    ("missing meeting of the cluster", SOFTMAX, CLUSTER, "    cluster_sync();\n#pragma", "#pragma"),
    ("sums of the first block for all", SOFTMAX, CLUSTER, "read_four_at(block,", "read_four_at(0,"),
    ("a block left out", SOFTMAX, CLUSTER, "block < CLUSTER_BLOCKS; ++block", "block < CLUSTER_BLOCKS - 1; ++block"),
    ("sums overwritten by the next pass", SOFTMAX, TWO, "PLACES = MEETINGS > 1 ? 2 : 1", "PLACES = 1"),
    ("sums overwritten by the next turn", SOFTMAX, TURNS, "PLACES = MEETINGS > 1 ? 2 : 1", "PLACES = 1"),
    ("shuffle one step short", SOFTMAX, WARP, "step = LANES / 2", "step = LANES / 4"),
    ("a row too many", SOFTMAX, WARP, "row < rows", "row <= rows"),
    ("sum rounded to bfloat16", SOFTMAX, BLOCK, "return word[1]; }", "return to_float(from_float(word[1])); }"),
    ("next row over one that is still read", SOFTMAX, RING, "__syncthreads();\n        if (threadIdx.x == 0) load(number", "if (threadIdx.x == 0) load(number"),
    ("chunk that is not waited for", SOFTMAX, RING, "ring.wait(turn * CHUNKS + i / RUNS_PER_CHUNK);", ""),
    ("wait for the slot's first chunk", SOFTMAX, RING, "number / SLOTS % 2", "0"),
    ("next row behind the last", SOFTMAX, RING, " || row >= rows) return;", ") return;"),
    ("next row of another block", SOFTMAX, RING, "number >= TURNS * CHUNKS || row", "row"),
    ("slots counted as chunks", SOFTMAX, RING, "load(number + SLOTS)", "load(number + CHUNKS)"),
    ("barriers that the copies do not know", SOFTMAX, RING, "            barrier_init_fence();\n", ""),
    ("chunks of the first block for all", SOFTMAX, RING_OF_CLUSTER, "number % CHUNKS * CLUSTER_BLOCKS + cluster_rank()", "number % CHUNKS * CLUSTER_BLOCKS"),
    ("chunk without a phase", SHORT, RING_OF_CLUSTER, "arrive_expect_tx(barrier, bytes);\n        if (bytes == 0) return;", "if (bytes == 0) return;\n        arrive_expect_tx(barrier, bytes);"),
    ("slots released for the row before", ENTROPY_AGAIN, {**RING, "passes": "two"}, "i += RUNS_PER_CHUNK) ring.release(turn * CHUNKS + i / RUNS_PER_CHUNK)", "i += RUNS_PER_CHUNK) ring.release((turn - 1) * CHUNKS + i / RUNS_PER_CHUNK)"),
    ("columns of the first block for all", SILU, COLUMNS, "blockIdx.x % CLUSTER_BLOCKS * RUNS_PER_THREAD + i", "i"),
    ("label below 0 read", ENTROPY, BLOCK, "label >= 0 && ", ""),
    ("label beyond the last read", ENTROPY, BLOCK, " && label < COLUMNS", ""),
    ("labels of the row before", ENTROPY, WARP, "labels[row]", "labels[row > 0 ? row - 1 : 0]"),
    ("maximum left out of the loss", ENTROPY, BLOCK, "(centre - to_float(own[label]))", "(0.0f - to_float(own[label]))"),
    ("loss by the logarithm to 2", ENTROPY, BLOCK, "logf(", "log2f("),
    ("loss of every thread", ENTROPY, BLOCK, " && thread_of_row() == 0", " && thread_of_row() == 0 && row > 0"),
    ("pairs of neighbours", ROPE, WARP, "second = first + HALF;", "second = first + VECTOR;"),
    ("the other rotation", ROPE, WARP, "- b.element[j] * sine", "+ b.element[j] * sine"),
    ("positions of rows in order", ROPE, WARP, "positions[row]", "row"),
    ("sines of the first half", ROPE, BLOCK, "angle + HALF + within", "angle + within"),
    ("halves exchanged", SILU, BLOCK, "gate = to_floats(read_run(own + column_of(i))), up = to_floats(read_run(own + COLUMNS + column_of(i)))", "up = to_floats(read_run(own + column_of(i))), gate = to_floats(read_run(own + COLUMNS + column_of(i)))"),
    ("exponential without the sign", SILU, BLOCK, "exp2_approx(-gate", "exp2_approx(gate"),
    ("sigmoid by a quotient that overflows", SILU, WARP, "__fdividef(gate.element[j], 1.0f + exp2_approx(-gate.element[j] * LOG2_E))", "gate.element[j] * exp2_approx(gate.element[j] * LOG2_E) / (1.0f + exp2_approx(gate.element[j] * LOG2_E))"),
]  # fmt: skip
FAST = (
    "no maximum",
    "missing meeting of the cluster",
    "next row over one",
    "label beyond the last read",
    "pairs of neighbours",
)
"""one of precision, two of synchronisation, of bounds and of what is computed"""


@planted(("problem", "wanted", "old", "new"), FAULTS, *FAST)
def test_a_planted_fault_is_caught(kernel_gate, problem, wanted, old, new):
    gate = kernel_gate(problem)
    assert gate.refutes(gate.configuration(wanted), old, new), "the fault escaped"


@pytest.mark.parametrize("problem", [SOFTMAX, *more([ENTROPY])])
def test_a_block_that_ends_while_others_read_its_sums_is_caught_in_machine_code(kernel_gate, problem):
    require_tools()
    gate = kernel_gate(problem)
    config = gate.configuration(CLUSTER)
    assert gate.judge_binary(config).correct
    found = gate.judge_binary(config, gate.doctored(config, "    cluster_sync();  // nobody", "    // nobody"))
    assert "of the cluster ends, whose shared memory" in found.reason


@pytest.mark.parametrize("number", [1, *more(n for n in range(8) if n != 1)])
@pytest.mark.parametrize("problem", [ENTROPY, ROPE, *more([LAYER, RMS, SOFTMAX, SILU, ODD, SMALL])])
def test_a_valid_configuration_passes(kernel_gate, problem, number):
    """The first start point, and others drawn from the space."""
    gate = kernel_gate(problem)
    config = (*gate.space.starts[:1], *gate.draw(8, seed=5))[number]
    verdict = gate.judge(config, seed=number)
    assert verdict.outcome is None, f"{config}: {verdict.reason}"


TORCH = {
    "layer_norm": lambda p, x, weight, bias: torch.layer_norm(x, (p.hidden,), weight, bias, 1e-5),
    "rms_norm": lambda p, x, weight: torch.rms_norm(x, (p.hidden,), weight, 1e-6),
    "softmax": lambda p, x: torch.softmax(x, -1),
    "cross_entropy": lambda p, x, labels: torch.nn.functional.cross_entropy(x, labels.long(), reduction="none"),
    "silu_mul": lambda p, x: torch.nn.functional.silu(x[:, : p.hidden]) * x[:, p.hidden :],
    "rope": lambda p, x, positions, cos_sin: turned(p, x, *cos_sin[positions.long()].chunk(2, -1)),
}


def turned(problem, x, cos, sin):
    """RoPE as Llama's code has it: x · cos + rotate_half(x) · sin, for each head."""
    heads = x.view(problem.rows, -1, problem.head_dim)
    first, second = heads.chunk(2, -1)
    cos, sin = (torch.cat([half, half], -1)[:, None] for half in (cos, sin))
    return (heads * cos + torch.cat([-second, first], -1) * sin).view(x.shape)


@pytest.mark.parametrize("operator", OPERATORS)
def test_the_reference_is_torch_s(operator):
    workload, problem = parse_problem(f"rowwise:{operator},rows6,hidden128,{'d64,' if operator == 'rope' else ''}fp32")
    inputs = workload.tensors().draw(Case("any", problem), seed=3).inputs
    doubles = {name: tensor.double() for name, tensor in inputs.items()}
    (found,) = workload.tensors().reference(problem, inputs).values()
    torch.testing.assert_close(found, TORCH[operator](problem, **doubles))


def test_a_label_that_is_no_column_has_no_loss_and_a_masked_one_an_infinite():
    workload, problem = parse_problem("rowwise:cross_entropy,rows5,hidden4,fp32")
    x = torch.tensor([[1.0, 2.0, 3.0, -torch.inf]]).repeat(5, 1)
    labels = torch.tensor([-100, -1, 4, 3, 2], dtype=torch.int32)
    loss = workload.tensors().reference(problem, {"x": x, "labels": labels})["loss"]
    assert loss[:3].tolist() == [0.0, 0.0, 0.0] and loss[3].isinf() and 0 < float(loss[4]) < 1


def running_means(rows, run=64):
    """Means of rows as threads in turn merge those of their runs of columns, in float32."""
    mean = np.zeros(len(rows), np.float32)
    for count, first in enumerate(range(0, rows.shape[1], run)):
        own = rows[:, first : first + run].mean(1, dtype=np.float64).astype(np.float32)
        mean += (own - mean) * np.float32(1 / (count + 1))
    return torch.from_numpy(mean)[:, None]


@pytest.mark.parametrize(("off", "right"), [(0.0, True), (1e-4, False)])
def test_a_mean_may_have_the_roundings_of_any_order_and_no_more(off, right):
    """Rows of a mean of 100: the error of the measure's own mean is near zero in some row of every few cases."""
    workload, problem = parse_problem("rowwise:layer_norm,rows40,hidden2048,fp32")
    found = []
    for seed in range(10):
        drawn = workload.tensors().draw(case := Case("own rows", problem, "extreme rows"), seed)
        x, weight, bias = (drawn.inputs[name] for name in ("x", "weight", "bias"))
        centred = x - running_means(x.numpy()) * (1 + off)
        y = centred / (centred.square().mean(1, keepdim=True) + problem.of.eps).sqrt() * weight + bias
        found.append(compare(workload, case, drawn, {"y": y}, seed).correct)
    assert found == [right] * 10


def test_samples_are_rows_of_the_whole_problem():
    workload, problem = parse_problem("rowwise:cross_entropy,rows1000,hidden8,fp32")
    tensors = workload.tensors()
    inputs = tensors.draw(Case("whole", problem), seed=1).inputs
    (sample,) = tensors.samples(problem, inputs, seed=2)
    own = tensors.reference(sample.problem, sample.inputs)["loss"]
    assert torch.equal(own, sample.take(tensors.reference(problem, inputs))["loss"])


@pytest.mark.parametrize(
    ("text", "bytes_"),
    [
        ("rowwise:softmax,rows10,hidden8,bf16", 2 * 10 * 8 * 2),
        ("rowwise:softmax,rows10,hidden8,bf16,out_fp32", 10 * 8 * (2 + 4)),
        ("rowwise:layer_norm,rows10,hidden8,fp32", 4 * (2 * 10 * 8 + 2 * 8)),
        ("rowwise:cross_entropy,rows10,hidden8,fp16", 10 * (8 * 2 + 4 + 4)),
        ("rowwise:silu_mul,rows10,hidden8,fp16", 3 * 10 * 8 * 2),
        ("rowwise:rope,rows10,hidden8,d4,positions100,fp16", 2 * 10 * 8 * 2 + 10 * 4 + 10 * 4 * 4),
        ("rowwise:rope,rows10,hidden8,d4,positions3,fp16", 2 * 10 * 8 * 2 + 10 * 4 + 3 * 4 * 4),
    ],
)
def test_figures_count_every_tensor_once(text, bytes_):
    workload, problem = parse_problem(text)
    assert workload.min_dram_bytes(problem) == bytes_


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("rowwise:softmax,rows4,hidden9,fp16", RowwiseProblem("softmax", 4, 9, "fp16", "fp16")),
        ("rowwise:rms_norm,rows4,hidden9,bf16,out_fp32", RowwiseProblem("rms_norm", 4, 9, "bf16", "fp32")),
        ("rowwise:rope,rows4,hidden256,d64,positions9,bf16", RowwiseProblem("rope", 4, 256, "bf16", "bf16", 64, 9)),
    ],
)
def test_a_problem_is_read_and_written(text, found):
    assert parse_problem(text)[1] == found and str(found) == text


def test_positions_of_a_prediction_lie_within_the_few_rows_of_cos_sin():
    workload, problem = parse_problem("rowwise:rope,rows40,hidden256,positions7,fp16")
    positions = workload.indices(problem, {}, 1)["positions"].view(np.int32)
    assert positions.shape == (40,) and {*positions.tolist()} == {*range(7)}


def test_rope_has_heads_of_128_and_a_position_for_each_row_unless_it_says_so():
    assert str(parse_problem("rowwise:rope,rows7,hidden256,fp16")[1]).endswith("hidden256,d128,positions7,fp16")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rowwise:rows4,hidden9,fp16", "does not give operator; write it like rowwise:softmax,rows8192"),
        ("rowwise:softmin,rows4,hidden9,fp16", "a part 'softmin' that is not rows, hidden, d, positions with a number"),
        ("rowwise:softmax,rows4,hidden9,d4,fp16", "gives head_dim, which only rope has: leave it out"),
        ("rowwise:rope,rows4,hidden96,d64,fp16", "must be even and divide hidden96"),
        ("rowwise:rope,rows4,hidden9,d9,fp16", "d9, must be even"),
        ("rowwise:softmax,rows4,hidden9,bf16,out_fp16", "leave out_fp16 out, or write out_fp32"),
        ("rowwise:cross_entropy,rows4,hidden9,bf16,out_bf16", "a loss, which is fp32: leave out_bf16 out"),
    ],
)
def test_a_text_that_is_no_problem_is_called_by_its_fault(text, said):
    with pytest.raises(UsageError) as error:
        parse_problem(text)
    assert said in str(error.value) and "\n" not in str(error.value)
