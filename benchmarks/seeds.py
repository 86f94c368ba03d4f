"""Replay the hand-made road to a fused attention kernel in the families that ship, and write docs/seeds.md's tables.

    python -m benchmarks.seeds [--trials 60] [--no-search]

Every step that a family can take is a configuration, which both judges judge to the end and whose time is predicted.
Two searches then show what lies beyond. All is written to benchmarks/results/seeds.json, from which the page is made;
`--no-search` keeps the searches that are recorded there.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import evoengine
from evoengine.records import Candidate, Config

ROOT = Path(__file__).resolve().parents[1]
PAGE, RESULTS = ROOT / "docs" / "seeds.md", ROOT / "benchmarks" / "results" / "seeds.json"
BEGINS = "<!-- by benchmarks/seeds.py -->"
SEED = 20261126
PROBLEMS = {"l4": "b1,h8,s512,d64,fp16", "h100": "b16,h16,s2048,d64,fp16"}
"""the batch and heads of the L4 runs are not reported: these fit S 512, D 64"""
SCALAR: Config = {"family": "scalar", "stages": 1, "vector": 8, "reduction": "shuffle", "o_in": "registers"}
WMMA: Config = {"family": "wmma", "tile_m": 64, "tile_n": 64, "vector": 8, "reduction": "shuffle", "lanes": 4}
MMA: Config = {"family": "mma", "tile_m": 128, "warps": 4, "stages": 1, "layout": "swizzle"}
BY_HAND: Config = {**WMMA, "warps": 8, "warps_n": 2, "pad": 16, "stages": 2, "alias_sp": False}
KEPT: Config = {"o_in": "registers", "q_in": "shared", "min_blocks": 1}
FIRST_WGMMA: Config = {
    "family": "wgmma",
    "tile_m": 192,
    "tile_n": 128,
    "stages": 2,
    "load": "tma",
    "p_in": "registers",
    "o_store": "shared",
    "overlap": True,
    "pv_wait": "after_max",
    "v_ahead": False,
    "ping_pong": True,
    "schedule": "none",
    "cluster": 1,
    "exp2_on_fma": 0.0,
    "max_by": "floats",
    "rescale_above": 0,
    "producer_registers": 24,
    "min_blocks": 1,
}


@dataclass(frozen=True)
class Step:
    """A step of the road: what the team reported of it, and the configuration that makes its choices."""

    gpu: str
    name: str
    reported: str
    config: Config | None
    """None where no family can make them"""
    unlike: str = ""
    """how the configuration differs from the step, or why there is none"""


STEPS = (
    Step("l4", "minimal, one block a row", "2,870 µs; SDPA 47", {**SCALAR, "tile_m": 16, "tile_n": 16, "warps": 2,
         "rows": 2, "pad": 0, "min_blocks": 1}, "16 rows a block, the fewest of a family"),
    Step("l4", "v1 to v5, scalar, spills removed", "2,122 µs", {**SCALAR, "tile_m": 64, "tile_n": 64, "warps": 8,
         "rows": 4, "pad": 8, "min_blocks": 1}, "tiles are not reported"),
    Step("l4", "v6, WMMA for Q·Kᵀ, 64×64, 4 warps", "447 µs; SDPA 43, Triton 76, CUTLASS 74", {**WMMA, "warps": 4,
         "warps_n": 1, "pad": 8, "stages": 1, "alias_sp": False, **KEPT}, "both products by WMMA"),
    Step("l4", "v7, WMMA for P·V", "crashed", {**WMMA, "warps": 4, "warps_n": 1, "pad": 8, "stages": 2,
         "alias_sp": True, **KEPT}, "two buffers, P over S"),
    Step("l4", "target", "< 40 µs", {**MMA, "tile_m": 64, "tile_n": 64, "q_in": "registers",
         "v_wait": "before_softmax", "min_blocks": 1}, "the step after: mma.sync and ldmatrix"),
    Step("h100", "minimal; cuBLASLt; split-K", "0.65; 0.45; 0.83 TFLOPS", None,
         "S and P go through memory: every family is fused"),
    Step("h100", "fused, naive products, 32×32, 128 threads, 12 KB", "6.42 TFLOPS, 42.8 ms", {**SCALAR, "tile_m": 32,
         "tile_n": 32, "warps": 4, "rows": 2, "pad": 0, "min_blocks": 1}, "scores in shared memory as well"),
    Step("h100", "fused, naive products, 64×64", "spilled 4,160 B", {**SCALAR, "tile_m": 64, "tile_n": 64, "warps": 8,
         "rows": 4, "pad": 8, "min_blocks": 1}, "rows held by several threads: no spill"),
    Step("h100", "WMMA, 64×64, 8 warps, pad 16, two buffers, 88 KB", "10.87 TFLOPS, 25.3 ms",
         {**BY_HAND, **KEPT}, ""),
    Step("h100", "hoped: WGMMA and TMA", "15 to 25 TFLOPS", FIRST_WGMMA, "tiles of FlashAttention-3"),
)  # fmt: skip


def as_row(found: Candidate) -> dict[str, Any]:
    """Return what the page says of a judged candidate, as JSON."""
    figure = found.measurement
    row: dict[str, Any] = {"config": dict(found.config), "correct": bool(found.correct), "reason": found.reason}
    if found.binary is not None and found.source is not None:
        row |= {"registers": found.binary.registers, "spill_bytes": found.binary.spill_bytes}
        row |= {"shared_kb": (found.binary.shared_bytes + found.source.launch.shared_bytes) // 1024}
    if figure is not None:
        assert not figure.by_formula, "the page tells of times predicted from machine code alone"
        row |= {"us": figure.compared_us, "tflops": figure.tflops, "clock_ghz": figure.terms["clock_ghz"]}
        row |= {"model": figure.device, "low_us": figure.terms["low_us"], "high_us": figure.terms["high_us"]}
        row |= {"bound": next(name[6:] for name, on in figure.terms.items() if name.startswith("bound_") and on)}
    return row


def replayed() -> list[dict[str, Any] | None]:
    """Return, for each of STEPS, its row, or None where it has no configuration."""
    rows: list[dict[str, Any] | None] = []
    for step in STEPS:
        if step.config is None:
            rows.append(None)
            continue
        judged = evoengine.verify(step.config, PROBLEMS[step.gpu], step.gpu, device="emulator", seed=SEED)
        rows.append(as_row(judged.candidate))
        print(f"{step.gpu}, {step.name}: {judged}", file=sys.stderr)
    return rows


def searched(trials: int) -> dict[str, dict[str, Any]]:
    """Return for each GPU the best candidate of a search of so many trials, with the number tried and correct."""
    found = {}
    for gpu, problem in PROBLEMS.items():
        with tempfile.TemporaryDirectory(prefix="evoengine-") as folder:
            result = evoengine.tune(
                problem, gpu, trials=trials, device="emulator", seed=SEED, db=Path(folder, "evo.db")
            )
            found[gpu] = {**as_row(result.best[0]), "trials": result.progress.done, "whole": len(result.best)}
        print(f"{gpu}: {found[gpu]}", file=sys.stderr)
    return found


def named(config: Mapping[str, Any]) -> str:
    """Return a configuration in one cell: the family, the tile, and each further knob."""
    rest = [f"{k} {str(v).lower() if isinstance(v, bool) else v}" for k, v in config.items()]
    first = f"{config['family']} {config['tile_m']}×{config['tile_n']}"
    return ", ".join([first, *(r for r in rest if r.split()[0] not in ("family", "tile_m", "tile_n"))])


def _predicted(row: Mapping[str, Any] | None) -> list[str]:
    if row is None:
        return ["–"] * 5
    if not row["correct"] or "us" not in row:
        return [f"`{named(row['config'])}`", f"refused: {row['reason']}", "–", "–", "–"]
    size = f"{row['registers']}, {row['spill_bytes']}, {row['shared_kb']}"
    verdict = "correct"
    time, low, high = (f"{row[name]:,.{0 if row[name] >= 100 else 1}f}" for name in ("us", "low_us", "high_us"))
    predicted = f"{time} ({low} to {high}), {row['tflops']:.3g} TFLOPS at {row['clock_ghz']:.2f} GHz"
    return [f"`{named(row['config'])}`", verdict, size, predicted, row["bound"]]


def tables(results: Mapping[str, Any]) -> str:
    """Return the made part of the page."""
    text = []
    for gpu, problem in PROBLEMS.items():
        own = [(s, r) for s, r in zip(STEPS, results["steps"], strict=True) if s.gpu == gpu]
        beyond = results["searches"][gpu]
        text += [f"## {gpu.upper()}, `attention:{problem}`", ""]
        text += [f"Predicted by {beyond['model']}.", ""]
        text += ["| step | reported by the team | configuration | gate | registers, spilled bytes, KB shared "
                 "| predicted µs | bound by | unlike the step |", "|---|---|---|---|---|---|---|---|"]  # fmt: skip
        text += [f"| {' | '.join([s.name, s.reported, *_predicted(r), s.unlike or '–'])} |" for s, r in own]
        tried = f"the best of {beyond['trials']} trials, {beyond['whole']} of them judged to the end"
        text += [f"| **beyond, by search** | – | {' | '.join(_predicted(beyond))} | {tried} |", ""]
    return "\n".join(text)


def page(before: str, results: Mapping[str, Any]) -> str:
    """Return the page whose text begins with `before`, with the tables that `results` make."""
    return f"{before.partition(BEGINS)[0]}{BEGINS}\n\n{tables(results)}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=60, help="of each search (default: 60)")
    parser.add_argument("--no-search", action="store_true", help="keep the recorded searches")
    options = parser.parse_args(arguments)
    kept = json.loads(RESULTS.read_text("utf-8"))["searches"] if options.no_search else None
    results = {"steps": replayed(), "searches": kept or searched(options.trials)}
    RESULTS.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", "utf-8")
    PAGE.write_text(page(PAGE.read_text("utf-8"), results), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
