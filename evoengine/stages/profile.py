"""Profile a kernel by Nsight Compute's counters, or by the model where they cannot be read, and run the sanitizers.

The tools start the kernel in a process of their own, `evoengine.timing.launch_once`.
"""

from __future__ import annotations

import csv
import os
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from evoengine.errors import EvoengineError
from evoengine.gpu import Gpu
from evoengine.records import Binary, CompiledCandidate, Profile
from evoengine.sandbox.jail import needs_jail
from evoengine.sass.core import Program
from evoengine.sass.listing import instructions
from evoengine.sass.model import Timed, addresses, stall_names
from evoengine.sass.predict import Prediction, Unpredictable
from evoengine.stages.compile import listing_of
from evoengine.stages.predict import model_name, predict_binary
from evoengine.stages.toolchain import in_jail
from evoengine.workloads.base import Target

NCU, SANITIZER = "ncu", "compute-sanitizer"
SECONDS = 300.0
"""time limit of a tool, which replays a kernel many times"""
COUNTERS = {
    "tensor pipe %": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "MUFU pipe %": "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",
    "DRAM throughput %": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "L2 throughput %": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "achieved occupancy %": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "shared bank conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
    "shared wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",
}
STALLED = "regex:smsp__average_warps_issue_stalled_.*_per_issue_active"
STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+?)_per_issue_active(?:\.ratio)?\Z")
STALLS = 5
"""number of displayed stall reasons"""
WORKING = ("selected", "not_selected")
"""stall reasons of warps that could issue"""
PIPES = {
    "tensor": r"[HIQDB]?G?MMA(\.\w+)*",
    "MUFU": r"MUFU",
    "FP32": r"F(FMA|ADD|MUL|MNMX|SETP|SEL|CHK)\d?",
    "FP16": r"H(ADD|MUL|FMA|MNMX|SETP)2",
    "shared memory": r"(LDS|STS|LDSM|STSM|ATOMS)",
    "global memory": r"(LDG|STG|LDGSTS|UTMA\w+|RED|ATOMG?|LD|ST)",
    "spills": r"(LDL|STL)",
    "synchronisation": r"(BAR|SYNCS|WARPSYNC|BSYNC|DEPBAR|LDGDEPBAR|MEMBAR|WARPGROUP\w*|B2R)",
    "shuffle": r"SHFL",
}
"""pipe → SASS opcodes that it executes"""


class ToolFailed(Exception):
    """The tool is missing or not permitted; the message states which."""


def profile(target: Target, contender: CompiledCandidate, device: str, uuid: str | None) -> Profile:
    """Return the profile by counters on the GPU `uuid`, with the sanitizers' output.

    It is by the model of the chip if they are not available. `device` names what is profiled; None for `uuid` means
    that there is no GPU here.
    """
    if uuid is None:
        return profile_without_gpu(target, contender)
    remarks = [sanitize(tool, target, contender, uuid) for tool in ("memcheck", "racecheck")]
    try:
        counters = read_counters(target, contender, uuid)
    except ToolFailed as error:
        page = profile_without_gpu(target, contender)
        return replace(page, remarks=(*page.remarks, str(error), *remarks))
    return Profile("Nsight Compute", device, counters, tuple(remarks))


# ── counters ────────────────────────────────────────────────────────────────────────────────────────────────────────


def read_counters(target: Target, contender: CompiledCandidate, uuid: str) -> dict[str, float]:
    """Return the counters. Raises ToolFailed if Nsight Compute is not installed or may not read counters."""
    metrics = ",".join((*_known(COUNTERS.values(), uuid), STALLED))
    one = ("--kernel-name", contender.source.entry, "--launch-count", "1")
    # by default ncu locks the clocks to their base, which changes figures and disturbs other users of the GPU
    options = ("--clock-control", "none", "--csv", "--page", "raw", *one, "--metrics", metrics)
    done = _run(NCU, options, target, contender, uuid)
    if "ERR_NVGPUCTRPERM" in done.stdout + done.stderr:
        raise ToolFailed("Nsight Compute may not read the GPU's counters (ERR_NVGPUCTRPERM): run as root")
    return read_csv(done.stdout)


def _known(metrics: Iterable[str], uuid: str) -> list[str]:
    """Return the metrics that ncu supports on this GPU, since an unknown one makes it fail.

    All are returned if it lists none. `--query-metrics` lists them by their first part, before `.avg` and the like.
    """
    done = _tool(NCU, ("--query-metrics",), uuid)
    listed = {line.split()[0] for line in done.stdout.splitlines() if "__" in line.partition(" ")[0]}
    return [m for m in metrics if not listed or m.partition(".")[0] in listed]


def read_csv(text: str) -> dict[str, float]:
    """Parse the counters and the top stall reasons of `ncu --csv --page raw`. Raises ToolFailed if there are none."""
    rows = list(csv.reader(line for line in text.splitlines() if line.startswith('"')))
    if len(rows) < 3:
        raise ToolFailed(f"Nsight Compute gave no counters: {' '.join(text.split())[-200:] or 'it said nothing'}")
    header, _, values = rows[0], rows[1], rows[2]
    found = {name: number for name, value in zip(header, values, strict=True) if (number := _number(value)) is not None}
    figures = {ours: found[theirs] for ours, theirs in COUNTERS.items() if theirs in found}
    stalls = {match[1]: value for name, value in found.items() if (match := STALL.match(name))}
    idle = [(reason, value) for reason, value in stalls.items() if reason not in WORKING]
    top = sorted(idle, key=lambda item: -item[1])[:STALLS]
    return figures | {f"stalled on {name.replace('_', ' ')}, warps per issue": value for name, value in top}


def _number(text: str) -> float | None:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


# ── sanitizers ──────────────────────────────────────────────────────────────────────────────────────────────────────


def sanitize(tool: str, target: Target, contender: CompiledCandidate, uuid: str) -> str:
    """Return the result of a compute-sanitizer tool on one launch as a line."""
    try:
        done = _run(SANITIZER, ("--tool", tool, "--error-exitcode", "77"), target, contender, uuid)
    except ToolFailed as error:
        return f"{tool} was not run: {error}"
    return read_sanitizer(tool, done.stdout)


def read_sanitizer(tool: str, text: str) -> str:
    lines = [line.removeprefix("=========").strip() for line in text.splitlines() if line.startswith("=========")]
    summary = next((line for line in reversed(lines) if "SUMMARY" in line), None)
    if summary is None:
        return f"{tool} gave no summary: {' '.join(lines)[-200:] or 'it said nothing'}"
    if re.search(r"SUMMARY: 0 (errors|hazards)", summary):
        return f"{tool}: clean"
    first = next((line for line in lines if line and "COMPUTE-SANITIZER" not in line and "SUMMARY" not in line), "")
    return f"{tool}: {summary}; first: {first}"


def _run(
    tool: str, options: Sequence[str], target: Target, contender: CompiledCandidate, uuid: str
) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory(prefix="evoengine-") as folder:
        job = Path(folder, "job.pickle")
        job.write_bytes(pickle.dumps((target, contender)))
        return _tool(tool, (*options, sys.executable, "-m", "evoengine.timing.launch_once", str(job)), uuid)


def _tool(tool: str, arguments: Sequence[str], uuid: str) -> subprocess.CompletedProcess[str]:
    path = shutil.which(tool)
    if path is None:
        raise ToolFailed(f"{tool} is not installed")
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": uuid}
    if tool == SANITIZER:
        # torch returns parts of larger allocations, whose bounds the sanitizer would not see
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    try:
        return subprocess.run(
            [path, *arguments],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=SECONDS,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        raise ToolFailed(f"{tool} did not end within {SECONDS:g} s") from None


# ── without a GPU ───────────────────────────────────────────────────────────────────────────────────────────────────


def profile_without_gpu(target: Target, contender: CompiledCandidate) -> Profile:
    """Return the model's profile, or the instruction mix with the reason if the model cannot read the binary.

    Raises MachineError for a proposal where there is no jail.
    """
    if needs_jail(contender.source.text):
        return in_jail(profile_without_gpu, target, contender, returns=Profile, raises=())
    try:
        return model_profile(target, contender)
    except Unpredictable as reason:
        page = static_profile(contender, target.gpu)
        return replace(page, remarks=(*page.remarks, f"the model cannot read the binary: {reason}"))


def static_profile(contender: CompiledCandidate, gpu: Gpu) -> Profile:
    """Return the profile from the compiler's report and the disassembly. An instruction in a loop counts once."""
    binary, launch = contender.binary, contender.source.launch
    shared = binary.shared_bytes + launch.shared_bytes
    figures = {f"{pipe}, % of instructions": share for pipe, share in shares(binary.mix).items()}
    figures["possible occupancy %"] = 100 * gpu.occupancy(launch.threads, binary.registers, shared)
    figures["blocks per SM"] = float(gpu.blocks_resident(launch.threads, binary.registers, shared))
    figures["spilled bytes per thread"] = float(binary.spill_bytes)
    remarks = ["static: counted in the binary's text, not observed on a GPU"]
    if not binary.mix:
        remarks.append("the instructions are unknown, as no disassembler was at hand when it was compiled")
    return Profile("static", f"{binary.arch} binary", figures, tuple(remarks))


def shares(mix: Mapping[str, int]) -> dict[str, float]:
    """Return the percentage of the instructions by pipe, `other` last; empty for an empty mix."""
    total = sum(mix.values())
    counts = dict.fromkeys((*PIPES, "other"), 0)
    for opcode, count in mix.items():
        counts[next((pipe for pipe, pattern in PIPES.items() if re.fullmatch(pattern, opcode)), "other")] += count
    return {pipe: 100 * count / total for pipe, count in counts.items() if count} if total else {}


# Profile a kernel by the model of its chip: how busy each pipe is, and where and why warps wait.

HOTTEST = 15
"""number of instructions on the page"""
LONGEST = 60
"""characters of an instruction's text"""
REASONS = 3
"""number of displayed reasons of an instruction's waiting"""
NOTABLE = 0.01
"""share of an instruction's waiting from which on a reason is displayed"""
READY = "not selected"
"""the reason of warps that could issue but were not selected"""
COUNTS = {
    "warp instructions": "instructions",
    "shared memory accesses": "shared_accesses",
    "shared memory wavefronts": "wavefronts",
    "sectors loaded": "sectors_loaded",
    "sectors stored": "sectors_stored",
    "local memory accesses": "local_accesses",
    "bytes loaded by TMA": "tensor_bytes_loaded",
    "bytes stored by TMA": "tensor_bytes_stored",
    "barriers": "barriers",
}
"""counts per block: name on the page → the core's name"""

REMARKS = (
    "by the model of the chip from the machine code, not observed on a GPU",
    "inputs are drawn: a kernel whose branches follow its data may do more or less on yours",
)


def model_profile(target: Target, contender: CompiledCandidate) -> Profile:
    """Return the model's profile.

    Raises Unpredictable if the model cannot read the binary, as `predict_binary` does.
    """
    listed = replace(contender, binary=_with_listing(contender.binary))
    prediction = predict_binary(target, listed)
    figures = dict(_of_launch(prediction, listed, target.gpu))
    figures |= figures_of(prediction, listed.binary.listing, listed.source.entry)
    return Profile("model", model_name(target.gpu, prediction.clock), figures, REMARKS)


def figures_of(prediction: Prediction, listing: str, entry: str) -> dict[str, float]:
    """Return how busy each pipe is, what a block does, and where and why warps wait, of a kernel in a listing."""
    figures = {f"{pipe}, % busy": 100 * share for pipe, share in prediction.shares.items()}
    figures |= {f"{name} per block": prediction.counts[own] for name, own in COUNTS.items() if prediction.counts[own]}
    assert prediction.timed is not None  # a new prediction has it
    figures |= dict(_waits(prediction.timed))
    return figures | dict(_hottest(prediction.timed, listing, entry))


def _with_listing(binary: Binary) -> Binary:
    """Return the binary with its listing, which the ledger does not store."""
    try:
        return replace(binary, listing=listing_of(binary))
    except EvoengineError as error:
        raise Unpredictable(str(error)) from error


def _of_launch(prediction: Prediction, contender: CompiledCandidate, gpu: Gpu) -> Iterator[tuple[str, float]]:
    binary, launch = contender.binary, contender.source.launch
    yield "predicted time, µs", prediction.time_us
    yield "shortest, µs", prediction.low_us
    yield "longest, µs", prediction.high_us
    yield "clocks", prediction.clocks
    yield "clock, GHz", prediction.ghz
    yield "waves", prediction.waves
    yield "blocks per SM", float(prediction.blocks_per_sm)
    yield (
        "possible occupancy %",
        100 * gpu.occupancy(launch.threads, binary.registers, binary.shared_bytes + launch.shared_bytes),
    )
    yield "registers per thread", float(binary.registers)
    yield "spilled bytes per thread", float(binary.spill_bytes)


def _waits(timed: Timed) -> Iterator[tuple[str, float]]:
    """Yield the percentage of all warps' stalls by reason, longest first."""
    of_reasons = timed.stalls.sum(axis=0)
    total = of_reasons.sum()
    for reason, clocks in sorted(zip(stall_names(), of_reasons, strict=True), key=lambda item: -item[1]):
        if clocks > 0:
            yield f"waiting: {reason}, % of warps' clocks", float(100 * clocks / total)


def _hottest(timed: Timed, listing: str, entry: str) -> Iterator[tuple[str, float]]:
    """Yield the instructions with the longest stalls: address, text, issues and reasons → percentage of all stalls."""
    texts = {i.address: " ".join(i.text.split())[:LONGEST] for i in instructions(listing, entry)}
    at = addresses(Program(listing, entry))
    names = stall_names()
    waits = np.where([name == READY for name in names], 0.0, timed.stalls)
    of_instructions = waits.sum(axis=1)
    total = of_instructions.sum()
    for n in np.argsort(-of_instructions, kind="stable")[:HOTTEST]:
        if of_instructions[n] > 0:
            place = f"{at[n]:#07x} {texts.get(at[n], '')} · issued {timed.issues[n]}"
            yield f"{place} · {_reasons(names, waits[n])}, % of waits", float(100 * of_instructions[n] / total)


def _reasons(names: Sequence[str], waits: np.ndarray) -> str:
    """Return `wgmma 81%, mbarrier 12%`."""
    longest = [n for n in np.argsort(-waits, kind="stable")[:REASONS] if waits[n] > NOTABLE * waits.sum()]
    return ", ".join(f"{names[n]} {waits[n] / waits.sum():.0%}" for n in longest)
