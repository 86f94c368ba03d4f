"""Which hypothesis of the model of Hopper a GPU bears out: one kernel with more and more of its exponentials on FMA.

Under A the tensor cores and MUFU exclude each other, so that exponentials on the FMA pipe are time gained; under B
other arithmetic loses issue slots to the tensor cores, so that they are time lost (benchmarks/NOTES.md, Model). The
kernels differ in the knob exp2_on_fma alone. benchmarks/gpu.py searches `narrowed_space` first, and asks `verdict` what
its times say. Times count beside that of the first kernel, so that clocks and memory, which all share, cancel out.
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
"""of the GPUs that the hypotheses are of"""


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
    """What was measured of the kernels of the sweep, what the model predicts of them, and which hypothesis is nearer.

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
    predicted: dict[str, dict[float, float]] = {}
    for share, candidate in sorted(swept.items()):
        for hypothesis, us in predict_binary(target, candidate.contender).hypotheses.items():
            predicted.setdefault(hypothesis, {})[share] = us
    return {"problem": str(parsed), "measured_us": measured, "predicted_us": predicted, **nearer(measured, predicted)}


def _is_of(candidate: Candidate, start: Config | None) -> bool:
    measured = candidate.measurement is not None and candidate.measurement.kind is Kind.MEASURED
    return start is not None and measured and candidate.config == {**start, KNOB: candidate.config.get(KNOB)}


def nearer(measured: Mapping[float, float], predicted: Mapping[str, Mapping[float, float]]) -> dict[str, object]:
    """`off`: by how much each hypothesis misses the measured times relative to the first, in the mean over the others;
    `nearer`: the one that misses them by less."""
    first, *others = measured

    def gained(times: Mapping[float, float], share: float) -> float:
        return math.log(times[first] / times[share])

    off = {
        hypothesis: sum(abs(gained(times, share) - gained(measured, share)) for share in others) / len(others)
        for hypothesis, times in predicted.items()
    }
    return {"off": off, "nearer": min(off, key=lambda hypothesis: off[hypothesis])}


def table(found: Mapping[str, object]) -> str:
    """Markdown: speed beside that of the kernel with least on FMA, measured and predicted."""
    measured, predicted, off = found["measured_us"], found["predicted_us"], found["off"]
    assert isinstance(measured, Mapping) and isinstance(predicted, Mapping) and isinstance(off, Mapping)
    first = next(iter(measured))
    rows = [f"| {KNOB} | measured | {' | '.join(predicted)} |", "|---:|" + "---:|" * (1 + len(predicted))]
    for share in measured:
        speeds = [times[first] / times[share] for times in (measured, *predicted.values())]
        rows.append(f"| {share} | " + " | ".join(f"{speed:.3f}" for speed in speeds) + " |")
    missed = ", ".join(f"{hypothesis} by {by:.1%}" for hypothesis, by in off.items())
    return "\n".join([*rows, "", f"nearer to hypothesis {found['nearer']} (missed: {missed})"])
