"""Right kernels of somebody's own pass, and their faults do not, most of which small sizes hide."""

from __future__ import annotations

import pytest

from evoengine.records import Outcome, Verdict
from tests.support.exhaustive import representatives
from tests.support.folders import gate
from tests.support.own_kernels import KERNELS as PLAIN
from tests.support.own_kernels_hidden import KERNELS as HIDDEN

KERNELS = (*PLAIN, *HIDDEN)

GOOD = [pytest.param(kernel, id=kernel.name) for kernel in KERNELS]
FAULTS = [
    pytest.param(kernel, name, seed, id=f"{kernel.name}-{name}-{seed}")
    for seed in (7, 8, 9)
    for kernel in KERNELS
    for name, *_ in kernel.faults
]


@pytest.mark.parametrize(
    "kernel",
    representatives(
        GOOD,
        "histogram",
        "volume",
        "gather",
        "two_kernels",
        "nibbles",
        "masked_softmax",
        "doubled",
        "inverse",
        "quantised",
    ),
)
def test_a_right_kernel_passes(tmp_path, kernel):
    verdict = gate(kernel.write(tmp_path), kernel.config)
    assert isinstance(verdict, Verdict) and verdict.correct, verdict.reason
    assert verdict.coverage is not None and verdict.coverage.missing == ()


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=pytest.mark.exhaustive) for seed in (21, 22)])
@pytest.mark.parametrize("kernel", GOOD)
def test_a_right_kernel_passes_with_other_knobs(tmp_path, kernel, seed):
    config = {"family": kernel.name, **{knob: values[seed % len(values)] for knob, values in kernel.knobs.items()}}
    verdict = gate(kernel.write(tmp_path), config, seed=seed)
    assert isinstance(verdict, Verdict) and verdict.correct, verdict.reason


# one of each class: a long row, a second launch, integers that are not written, blocks that return at full size,
# a second kernel, flags that only some sizes raise, atomics that are late, an offset in place, a row that is compared
# with the launch before, a tail of two, wide integers, other scalars, bytes that are not truth values, NaN and infinities
# of the reference, static memory that a bulk copy reads, shared memory that is zero in a later launch, equal values in
# one thread, a value at a threshold, minus zero, integers near the end of their range, a later turn over these, late
# blocks of integers that return, late blocks that leave a tensor as it was, values that a factor makes halfway between
# integers, and NaN where the reference has a number for it
FAST = (
    "argmax-columns beyond 4,096 are not looked at-7",
    "histogram-the counter is never reset-7",
    "greater-only what is true is written-7",
    "transpose-a tenth of the blocks return-7",
    "two_kernels-the last split is left out-7",
    "stream_k-flags stay up-7",
    "largest-the counter is raised before the maximum-8",
    "in_place-an offset of 32 bits-7",
    "row_scale-a row that begins as before is skipped-7",
    "in_fours-a tail of two is swapped-7",
    "nibbles-the upper four are swapped-7",
    "axpy-the factor is the example's-7",
    "larger-true is 255-7",
    "masked_softmax-rows without keys are zero-7",
    "doubled-static memory is not fenced-7",
    "logarithm-that of zero is zero-7",
    "logarithm-unset shared memory is zero-7",
    "argmax-a thread takes the last of equal ones-7",
    "over_half-a half is over a half-7",
    "signs-minus zero has no sign-7",
    "means-the sum leaves 32 bits-7",
    "running-what is carried leaves 32 bits-7",
    "negated-a third of the late blocks return-7",
    "positive-late blocks leave a quarter-7",
    "scaled-a half is rounded away from zero-7",
    "no_nan-NaN stays-7",
)


@pytest.mark.parametrize(("kernel", "fault", "seed"), representatives(FAULTS, *FAST))
def test_a_fault_is_caught(tmp_path, kernel, fault, seed):
    found = gate(kernel.write(tmp_path, kernel.broken(fault)), kernel.config, seed=seed)
    assert found.outcome in (Outcome.INCORRECT, Outcome.CRASHED, Outcome.HUNG), "the fault escaped"
    assert found.reason


def test_the_kernels_are_many():
    assert len(KERNELS) >= 20 and len({kernel.name for kernel in KERNELS}) == len(KERNELS)
