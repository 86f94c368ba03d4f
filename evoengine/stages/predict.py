"""A candidate's time without a GPU: predicted from its machine code on the chip it was compiled for.

Where the model cannot read a binary, the formula of `evoengine.stages.predict` gives the figure, with the reason.
"""

from __future__ import annotations

import math
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from evoengine.cuda_files import disassembler
from evoengine.devices.base import (
    Argument,
    ConstantArgument,
    ConstantParameter,
    KernelFailure,
    Parameter,
    ScratchParameter,
    TensorParameter,
)
from evoengine.errors import EvoengineError, MachineError
from evoengine.gpu import Gpu
from evoengine.records import Binary, CompiledCandidate, Kind, Launch, Measurement
from evoengine.sandbox.jail import needs_jail
from evoengine.sass.build import build
from evoengine.sass.chip import Clock, find_chip, why_unmodelled
from evoengine.sass.core import Program
from evoengine.sass.cubin import read_kernel
from evoengine.sass.launch import DrawnArgument, drawn_bytes, prepare
from evoengine.sass.predict import MODEL_VERSION, Prediction, Unpredictable, predict
from evoengine.stages.compile import listing_of
from evoengine.stages.toolchain import in_jail
from evoengine.workloads.base import Target, taken

SEED = 0
"""draws the addresses of tensors, the same for all candidates, so that their figures are comparable"""


class Estimated(NamedTuple):
    """An estimate of a candidate's time without a GPU."""

    figure: Measurement | None
    """None where the model of the chip cannot read the binary and its family states no cost"""
    model_error: str | None = None
    """why the model could not read the binary, so that the figure is the formula's; None where it could"""

    @property
    def by_model(self) -> bool:
        return self.figure is not None and self.model_error is None


def why_no_model(gpu: Gpu) -> str | None:
    """Return what is missing beside the executor for predictions on the GPU for any kernel; None if nothing is."""
    if unmodelled := why_unmodelled(gpu):
        return unmodelled
    try:
        find_chip(gpu.key)
    except EvoengineError as error:
        return str(error)
    return None if disassembler() else "nvdisasm was not found, which reads machine code: see evoengine doctor"


def _why_unbuilt() -> str | None:
    """Build the executor where this machine has none yet; return why it cannot be."""
    try:
        build()
    except EvoengineError as error:
        return str(error)
    return None


def predict_figure(target: Target, contender: CompiledCandidate, cost: Mapping[str, float]) -> Estimated:
    """Return the figure for the whole problem: by the model if it reads the binary, else by formula from `cost`."""
    try:
        prediction = predict_binary(target, contender)
    except Unpredictable as reason:
        figure = figure_by_formula(target, contender, cost)
        return Estimated(figure, f"the model cannot read the binary: {reason}")
    return Estimated(figure_of(prediction, target.gpu, target.flops))


def figure_by_formula(target: Target, contender: CompiledCandidate, cost: Mapping[str, float]) -> Measurement | None:
    """Return the figure by formula; None if the family states no cost."""
    launch = contender.source.launch
    return estimate(contender.binary, launch, cost, target.gpu, target.flops, target.min_dram_bytes)


def predict_binary(target: Target, contender: CompiledCandidate, cold: bool = True) -> Prediction:
    """Predict the launch for the problem, on tensors of its sizes with drawn contents; of several kernels the sum.

    `cold` says that nothing of the tensors is in the L2 before. A proposal's is predicted in a jail, and without how
    long each of its instructions waits.

    Raises Unpredictable where the machine code, its launch or the chip cannot be read, or a tool is missing.
    """
    if needs_jail(contender.source.text):
        return in_jail(_predict_alone, target, contender, cold, returns=Prediction, raises=(Unpredictable,))
    gpu = target.gpu
    if missing := why_no_model(gpu) or _why_unbuilt():
        raise Unpredictable(missing)
    if target.workload.host is not None:
        from evoengine.virtual.host import predict_launch

        return predict_launch(contender, target.clock, cold)
    binary, source, chip = contender.binary, contender.source, find_chip(gpu.key)
    try:
        contents = target.workload.indices(target.problem, contender.config, SEED)
        arguments = [_drawn(p, contents) for p in target.workload.parameters(target.problem, contender.config)]
        listing, kernels = listing_of(binary), source.launch.kernels(source.entry)
        work = (target.flops, target.min_dram_bytes) if len(kernels) == 1 else (0.0, 0.0)
        predictions = []
        for entry, geometry in kernels:
            own = taken(target.workload, entry, arguments)
            launch = prepare(read_kernel(binary.cubin, entry), geometry, own, SEED)
            predictions.append(predict(Program(listing, entry), launch, chip, *work, target.clock, cold))
        roofline_us = max(target.flops / chip.peak_flops, target.min_dram_bytes / chip.dram) * 1e6
        return _in_stream_order(predictions, roofline_us)
    except MachineError:
        raise  # what is missing was asked for above
    except (EvoengineError, KernelFailure, subprocess.TimeoutExpired) as error:
        raise Unpredictable(str(error)) from error


def _predict_alone(target: Target, contender: CompiledCandidate, cold: bool) -> Prediction:
    return replace(predict_binary(target, contender, cold), timed=None)


def _in_stream_order(predictions: Sequence[Prediction], roofline_us: float) -> Prediction:
    """Return the prediction of kernels one behind the other: the longest one's, with the times of all of them."""
    if len(predictions) == 1:
        return predictions[0]

    def total(name: str) -> float:
        return max(roofline_us, sum(float(getattr(p, name)) for p in predictions))

    return replace(
        max(predictions, key=lambda p: p.time_us),
        time_us=total("time_us"),
        low_us=total("low_us"),
        high_us=total("high_us"),
        clocks=sum(p.clocks for p in predictions),
        roofline_us=roofline_us,
    )


def _drawn(parameter: Parameter, contents: Mapping[str, np.ndarray] | None = None) -> DrawnArgument | Argument:
    if isinstance(parameter, ConstantParameter):
        return ConstantArgument(parameter.name, drawn_bytes(parameter.dtype, parameter.bytes))
    if isinstance(parameter, ScratchParameter):
        return DrawnArgument(parameter.name, parameter.bytes, parameter.dtype, output=True)
    if isinstance(parameter, TensorParameter):
        given = (contents or {}).get(parameter.name)
        return DrawnArgument(parameter.name, parameter.bytes, parameter.dtype, parameter.output, given)
    return parameter


def model_name(gpu: Gpu, clock: Clock) -> str:
    """Return the device of a prediction. Figures are compared where it is the same: one model, one clock.

    Version 1, of two hypotheses about wgmma, wrote `model for h100`.
    """
    return f"model {MODEL_VERSION} for {gpu.key}, {clock} clock"


def figure_of(prediction: Prediction, gpu: Gpu, flops: float) -> Measurement:
    """Return the prediction as a figure with its terms."""
    p = prediction
    terms = {
        "predicted": 1.0,
        "model_version": MODEL_VERSION,
        "low_us": p.low_us,
        "high_us": p.high_us,
        "roofline_us": p.roofline_us,
        f"bound_{p.bound}": 1.0,
        f"class_{p.kernel_class}": 1.0,
        f"clock_{p.clock}": 1.0,
        "clocks": p.clocks,
        "clock_ghz": p.ghz,
        "blocks_per_sm": p.blocks_per_sm,
        "waves": p.waves,
    }
    terms |= {f"{pipe}_share": share for pipe, share in p.shares.items()}
    floats = {name: float(value) for name, value in terms.items()}
    tflops = flops / p.time_us / 1e6 if flops else None
    return Measurement(Kind.ESTIMATED, model_name(gpu, p.clock), tflops, p.time_us, terms=floats)


# A static estimate of a candidate's time, where the model of the chip (`predict`) cannot read its binary.
#
# It is a prior, not a measurement, and ranked behind all predictions.
#
# Each block spends clocks on five pipes (tensor, FP32, MUFU, shared memory, global memory), by the space's own count of
# its work. Its phases follow one another across barriers, and those of blocks that share an SM hide behind one another:
# R blocks take R times the longest phase, and the other phases of one of them. Where a block's own warps are in
# different phases, the space states as `exposed` which part of those other phases is not hidden. What no warp waits for
# by itself only bounds the whole: copies that overlap, and shared memory where wgmma reads its operands there.

MUFU_PER_CLOCK = 16
"""exp2 results per SM and clock (CUDA C++ Programming Guide, arithmetic throughput, compute capability 8.x and 9.0)"""
SHARED_PER_CLOCK = 128
"""bytes per SM and clock: 32 banks of 4 bytes"""
GLOBAL_PER_CLOCK = 32
"""bytes per SM and clock out of the L2: a round prior, half of the nominal 64"""
BARRIER_CLOCKS = 40
"""a block-wide barrier with its re-fill of the pipelines: a round prior"""
MMA_SYNC_SHARE = 0.62
"""of Hopper's tensor peak that mma.sync (HMMA) reaches; the rest needs wgmma (Luo et al. 2024, arXiv:2402.13499)"""


def estimate(
    binary: Binary, launch: Launch, cost: Mapping[str, float], gpu: Gpu, flops: float, min_dram_bytes: float
) -> Measurement | None:
    """Return the estimated time in microseconds for the whole problem with its terms, or None.

    `cost` is per block, as stated by the space. None is returned if the space states no work of any pipe, since only
    memory would bound such a figure. The estimate is never below the roofline of `flops` and `min_dram_bytes`.
    """
    resident = gpu.blocks_resident(launch.threads, binary.registers, binary.shared_bytes + launch.shared_bytes)
    pipes = _pipes(binary, cost, gpu)
    if not any(pipes.values()):
        return None
    barriers = cost.get("barriers", 0.0) * BARRIER_CLOCKS
    copies = 0.0 if cost.get("overlap") else pipes["global"]
    apart = {"global", "shared"} if _has_wgmma(binary) else {"global"}
    phases = [clocks for name, clocks in pipes.items() if name not in apart]
    waited = cost.get("exposed", 1.0) * (sum(phases) - max(phases) + barriers + copies)

    def wave(blocks: int) -> float:
        return max(blocks * max(phases) + waited, blocks * max(pipes.values()))

    total = math.prod(launch.grid)
    slots = gpu.sms * resident
    full, rest = divmod(total, slots)
    clocks = full * wave(resident) + (wave(-(-rest // gpu.sms)) if rest else 0.0)
    to_us = 1e-3 / gpu.clock_ghz
    memory_us = min_dram_bytes / (gpu.memory_gbs * 1e3)
    time_us = max(clocks * to_us, memory_us, flops / gpu.tensor_tflops / 1e6)
    waves = total / slots
    terms = {f"{name}_us": clocks * waves * resident * to_us for name, clocks in pipes.items()}
    terms |= {
        "predicted": 0.0,
        "barriers_us": barriers * waves * to_us,
        "waited_us": waited * waves * to_us,
        "memory_us": memory_us,
        "waves": waves,
        "blocks_per_sm": float(resident),
    }
    return Measurement(Kind.ESTIMATED, f"estimate for {gpu.key}", flops / time_us / 1e6, time_us, terms=terms)


def _has_wgmma(binary: Binary) -> bool:
    return any("GMMA" in opcode for opcode in binary.mix)


def _pipes(binary: Binary, cost: Mapping[str, float], gpu: Gpu) -> dict[str, float]:
    """Return the clocks for which one block occupies each pipe of an SM."""
    per_clock = 1e3 / (gpu.sms * gpu.clock_ghz)
    share = MMA_SYNC_SHARE if gpu.arch.startswith("sm_90") and not _has_wgmma(binary) else 1.0
    return {
        "tensor": cost.get("tensor_flops", 0.0) / (gpu.tensor_tflops * per_clock * share),
        "fp32": cost.get("fp32_flops", 0.0) / (gpu.fp32_tflops * per_clock),
        "mufu": cost.get("mufu", 0.0) / MUFU_PER_CLOCK,
        "shared": cost.get("shared_bytes", 0.0) / SHARED_PER_CLOCK,
        "global": cost.get("global_bytes", 0.0) / GLOBAL_PER_CLOCK,
    }
