"""One attention kernel with more and more of its exponentials on FMA, measured and predicted.

Exponentials on the FMA pipe relieve MUFU, which loses a part of its rate while wgmmas compute: how much a kernel gains
by them holds that part of the model against a GPU. The kernels differ in the knob exp2_on_fma alone. benchmarks/gpu.py
searches `narrowed_space` first, and asks `verdict` what its times say. Times count beside that of the first kernel, so
that clocks and memory, which all share, cancel out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from evoengine.gpu import Gpu, find_gpu
from evoengine.ledger.store import open_ledger
from evoengine.paths import asset
from evoengine.records import Candidate, Config, Kind, Value
from evoengine.space.space import load_space
from evoengine.stages.predict import predict_binary
from evoengine.workloads import parse_problem
from evoengine.workloads.base import Target

KNOB = "exp2_on_fma"
SPACE = asset("search_spaces") / "attention.toml"
CAPABILITY = 90
"""of the GPUs that have wgmma"""


def start_of(problem: str, gpu: Gpu) -> Config | None:
    """The first start point of the wgmma family for the problem; None where it has none."""
    _, parsed = parse_problem(problem)
    starts = load_space(SPACE, parsed, gpu).starts
    return next((start for start in starts if start["family"] == "wgmma"), None)


def narrowed_space(start: Config) -> str:
    """The text of attention's space file with all knobs of the start held but the one that is swept."""
    held = [_equals(knob, value) for knob, value in start.items() if knob != KNOB]
    rules = [f'[[constraint]]\nexpr = "{rule}"\nwhy = "the sweep is over {KNOB} alone"\n' for rule in held]
    return "\n".join([SPACE.read_text(), *rules])


def _equals(knob: str, value: Value) -> str:
    if isinstance(value, bool):
        return knob if value else f"not {knob}"
    return f"{knob} == {value!r}"


def verdict(db: Path, problem: str, gpu_key: str) -> dict[str, object] | None:
    """Return what was measured of the kernels of the sweep, what the model predicts of them, and by how much it misses.

    None where fewer than two were measured. Raises Unpredictable where the model cannot read a binary.
    """
    workload, parsed = parse_problem(problem)
    target = Target(workload, parsed, find_gpu(gpu_key))
    start = start_of(problem, target.gpu)
    with open_ledger(str(db), create=False) as ledger:
        candidates = ledger.candidates(problem=str(parsed), gpu=gpu_key, with_cubin=True)
    swept = {float(c.config[KNOB]): c for c in candidates if _is_of(c, start)}
    if len(swept) < 2:
        return None
    measured = {share: c.ranked_by.median_us for share, c in sorted(swept.items())}
    predicted = {share: predict_binary(target, c.contender).time_us for share, c in sorted(swept.items())}
    off = missed(measured, predicted)
    return {"problem": str(parsed), "measured_us": measured, "predicted_us": predicted, "off": off}


def _is_of(candidate: Candidate, start: Config | None) -> bool:
    measured = candidate.measurement is not None and candidate.measurement.kind is Kind.MEASURED
    return start is not None and measured and candidate.config == {**start, KNOB: candidate.config.get(KNOB)}


def missed(measured: Mapping[float, float], predicted: Mapping[float, float]) -> float:
    """Return by how much predicted gains over the first kernel miss the measured ones, on average over the others."""
    first, *others = measured

    def gained(times: Mapping[float, float], share: float) -> float:
        return math.log(times[first] / times[share])

    return sum(abs(gained(predicted, share) - gained(measured, share)) for share in others) / len(others)


def table(found: Mapping[str, object]) -> str:
    """Return Markdown: speed beside that of the kernel with least on FMA, measured and predicted."""
    measured, predicted = found["measured_us"], found["predicted_us"]
    assert isinstance(measured, Mapping) and isinstance(predicted, Mapping)
    first = next(iter(measured))
    rows = [f"| {KNOB} | measured | predicted |", "|---:|---:|---:|"]
    for share in measured:
        speeds = [times[first] / times[share] for times in (measured, predicted)]
        rows.append(f"| {share} | " + " | ".join(f"{speed:.3f}" for speed in speeds) + " |")
    return "\n".join([*rows, "", f"the predicted gains miss the measured ones by {found['off']:.1%}"])
