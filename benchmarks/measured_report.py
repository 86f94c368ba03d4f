"""Tables of benchmarks/measured_h100.py: what was measured on a GPU beside what was predicted before."""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import rankdata

from evoengine.sass.chip import SUSTAINED, Clock, find_chip

Result = dict[str, Any]
CHIP = "h100"
BOOTSTRAPS = 2000
LEAST_RANKED = 5
"""rows of a problem for which ranks and first picks are computed"""
ALL_FAMILIES = ", all families"
WORST = 25
MARGINS = (0.0, 0.005, 0.01, 0.02, 0.03, 0.05, 0.08, 0.1, 0.15, 0.25)
DISAGREE = 0.05
"""of an output's root mean square, by which configurations of one problem may differ"""
EMPTY = ("latency", "1 block", "empty")


@dataclass(frozen=True)
class Pair:
    """A row with one state of the L2; µs are medians."""

    row: Mapping[str, Any]
    policy: str
    measured_us: float
    ghz: float
    empty_us: float

    @property
    def predicted(self) -> Mapping[str, Any]:
        return dict(self.row["predicted"][self.policy])

    @property
    def error(self) -> float:
        """Relative error of the time at the clock that the model assumes."""
        return float(self.predicted["us"]) / self.measured_us - 1

    @property
    def cycles_error(self) -> float:
        """Relative error of the clocks from the first block's start to the last one's end.

        The measured ones are the time, less what an empty kernel takes, at the measured clock.
        """
        measured = max(1e-3, self.measured_us - self.empty_us) * 1e3 * self.ghz
        return float(self.predicted["clocks"]) / measured - 1

    @property
    def group(self) -> tuple[str, str]:
        return self.row["set"], self.row["problem"]


def frozen(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the predictions alone: a line of JSON a row, with its cubin's digest."""
    lines = []
    for r in rows:
        of = {p: [r["predicted"].get(p, {}).get(n) for n in ("us", "clocks", "ghz")] for p in ("cold", "warm")}
        said = r["predicted"]["cold"]
        named = [r[n] for n in ("id", "set", "problem", "kernel")]
        one = [*named, r["cubin"][:16], said["class"], said["bound"], *of["cold"], *of["warm"]]
        lines.append(json.dumps(one, ensure_ascii=False, separators=(",", ":")))
    figures = [f"{policy}_{figure}" for policy in ("cold", "warm") for figure in ("us", "clocks", "ghz")]
    names = json.dumps(["id", "set", "problem", "kernel", "cubin", "class", "bound", *figures])
    model = rows[0]["model"] if rows else None
    return f'{{"model": {model}, "columns": {names}, "rows": [\n' + ",\n".join(lines) + "\n]}\n"


def page_rows(results: Mapping[str, Sequence[Result]], rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows with a cold L2 as benchmarks/accuracy_page.py reads them, in sets.

    Mechanisms of the model were formed on rows of the first data set with an even id. The set of latencies is left out:
    it was taken for micro-benchmarks.
    """
    return [
        {
            "set": f"measured_h100, {_part(pair.row)}",
            "kernel": f"{pair.row['set']}: {pair.row['kernel']}",
            "problem": pair.row["problem"],
            "gpu": CHIP,
            "clock": "boost",
            "measured_us": pair.measured_us,
            "predicted_us": pair.predicted["us"],
            "kernel_class": pair.predicted["class"],
            "bound": pair.predicted["bound"],
        }
        for pair in pairs_of(results, rows)
        if pair.policy == "cold" and pair.row["set"] != EMPTY[0]
    ]


def _part(row: Mapping[str, Any]) -> str:
    if "origin" in row:
        return "families"
    return "odd" if int(row["id"][-1], 16) % 2 else "even"


def pairs_of(results: Mapping[str, Sequence[Result]], rows: Sequence[Mapping[str, Any]]) -> list[Pair]:
    by_id = {row["id"]: row for row in rows}
    measured = [m for m in results["rows"] if "error" not in m and m["id"] in by_id]
    empty = {}
    for policy in ("cold", "warm"):
        of = [m for m in measured if tuple(by_id[m["id"]][k] for k in ("set", "problem", "kernel")) == EMPTY]
        empty[policy] = statistics.median(of[0][f"{policy}_us"]) if of else 2.5
    return [
        Pair(by_id[m["id"]], policy, statistics.median(m[f"{policy}_us"]), clock_of(m[f"{policy}_ghz"]), empty[policy])
        for m in measured
        for policy in by_id[m["id"]]["predicted"]
    ]


def clock_of(readings: Sequence[float]) -> float:
    good = [ghz for ghz in readings if 0.2 < ghz < 3]
    return statistics.median(good) if good else math.nan


def report(results: Mapping[str, Sequence[Result]], rows: Sequence[Mapping[str, Any]]) -> str:
    """Return Markdown."""
    pairs = pairs_of(results, rows)
    return "\n".join([
        "# Measured beside predicted", "", *about(results, rows), *errors(pairs, "class"), *errors(pairs, "set"),
        *ranks(pairs), *worst(pairs), *sustained(results, rows), *baselines(results, rows),
        *disagreeing(results, rows),
    ])  # fmt: skip


def about(results: Mapping[str, Sequence[Result]], rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    failed = [m for m in results["rows"] if "error" in m]
    clocks = [clock_of(m["warm_ghz"]) for m in results["rows"] if m.get("warm_ghz")]
    spread = [max(m["warm_us"]) / min(m["warm_us"]) - 1 for m in results["rows"] if m.get("warm_us")]
    yield f"{len(results['rows']) - len(failed)} of {len(rows)} rows measured, {len(failed)} failed."
    if clocks:
        yield f"Clock, median of rows {statistics.median(clocks):.3f} GHz, {min(clocks):.3f} to {max(clocks):.3f}."
        yield f"Slowest to fastest warm launch of a row, median {statistics.median(spread):.1%}."
    first = {m["id"]: m for m in results["rows"]}
    both = [(first[m["id"]], m) for m in results.get("again", ()) if m["id"] in first]
    for policy in ("warm_us", "cold_us"):
        of = [[statistics.median(m[policy]) for m in pair] for pair in both if all(policy in m for m in pair)]
        if of:
            off = [abs(a / b - 1) for a, b in of]
            most = np.percentile(off, 90)
            yield f"Measured again, {policy}: median {statistics.median(off):.1%} apart, nine of ten within {most:.1%}."
    here = sum(m.get("loaded") == "compiled here" for m in results["rows"])
    yield f"{here} compiled where they were measured, since the driver refused the binary." if here else ""
    names = {row["id"]: f"{row['set']}, {row['problem']}, {row['kernel']}" for row in rows}
    yield from (f"- failed: {names.get(m['id'], m['id'])}: {m['error'][:150]}" for m in failed[:20])


def errors(pairs: Sequence[Pair], by: str) -> Iterator[str]:
    """Yield a table of errors by class or by set, for times and for clocks, with a cold and a warm L2."""
    yield f"\n## By {by}\n"
    yield f"Mean |error| with its 95 % interval, signed mean, and Spearman's ρ over all rows of the {by}.\n"
    yield f"| {by} | L2 | rows | time | 95 % | signed | clocks | 95 % | signed | ρ |"
    yield "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|"
    groups: dict[tuple[str, str], list[Pair]] = defaultdict(list)
    for pair in pairs:
        name = pair.predicted["class"] if by == "class" else pair.row["set"]
        groups[name, pair.policy].append(pair)
        groups["all", pair.policy].append(pair)
    for (name, policy), of in sorted(groups.items()):
        cells = [name, policy, f"{len(of)}"]
        for values in ([p.error for p in of], [p.cycles_error for p in of]):
            known = np.array([v for v in values if math.isfinite(v)])
            if known.size:
                low, high = interval(np.abs(known))
                cells += [f"{np.abs(known).mean():.1%}", f"{low:.1%}…{high:.1%}", f"{known.mean():+.1%}"]
            else:
                cells += ["–"] * 3
        yield f"| {' | '.join(cells)} | {rho(of):.2f} |"


def comparison(
    results: Mapping[str, Sequence[Result]], before: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]
) -> str:
    """Return a table of errors of the same rows as predicted before they were measured and now, by class and by set.

    Rows with an odd last digit of their id, which formed no mechanism of the model, are shown apart. Classes are those
    of `before`.
    """
    again = {row["id"]: row for row in now}
    old = {(p.row["id"], p.policy): p for p in pairs_of(results, before) if p.row["id"] in again}
    new = {(p.row["id"], p.policy): p for p in pairs_of(results, now)}
    groups: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for key, pair in old.items():
        for name in ("all", pair.predicted["class"], f"set {pair.row['set']}"):
            groups[f"{name} | {pair.policy}"].append(key)
    then, since = (f"version {rows[0]['model']}" for rows in (before, now))
    lines = [
        f"| class or set | L2 | rows | {then} | signed | {since} | signed | odd ids | signed |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, keys in sorted(groups.items()):
        odd = [key for key in keys if int(key[0][-1], 16) % 2]
        cells = [f"{len(keys)}"]
        for of, chosen in ((old, keys), (new, keys), (new, odd)):
            errors_of = np.array([of[key].error for key in chosen]) if chosen else np.array([math.nan])
            cells += [f"{np.abs(errors_of).mean():.1%}", f"{errors_of.mean():+.1%}"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def interval(values: np.ndarray) -> tuple[float, float]:
    drawn = np.random.default_rng(0).integers(0, len(values), (BOOTSTRAPS, len(values)))
    low, high = np.percentile(values[drawn].mean(axis=1), [2.5, 97.5])
    return float(low), float(high)


def rho(of: Sequence[Pair]) -> float:
    predicted, measured = np.array([p.predicted["us"] for p in of]), np.array([p.measured_us for p in of])
    if len(of) < 3 or np.ptp(predicted) == 0 or np.ptp(measured) == 0:
        return math.nan
    return float(np.corrcoef(rankdata(predicted), rankdata(measured))[0, 1])


def ranks(pairs: Sequence[Pair]) -> Iterator[str]:
    yield "\n## By problem\n"
    yield "Of the configurations of a problem: ρ; the time of the predicted first, of the best of the predicted ten,"
    yield "of a random pick on average and of the slowest, each over that of the measured best.\n"
    yield "| set | problem | L2 | rows | ρ | first pick | best of ten | random pick | slowest | signed error |"
    yield "|---|---|---|---:|---:|---:|---:|---:|---:|---:|"
    groups: dict[tuple[str, str, str], list[Pair]] = defaultdict(list)
    for pair in pairs:
        if pair.row["config"] or pair.row["set"] == "fast.cu":
            groups[*pair.group, pair.policy].append(pair)
            if pair.row["config"]:
                whole = pair.row["set"].split()[0] + ALL_FAMILIES
                groups[whole, pair.row["problem"], pair.policy].append(pair)
    picks: dict[str, list[float]] = defaultdict(list)
    for (name, problem, policy), of in sorted(groups.items()):
        if len(of) < LEAST_RANKED:
            continue
        times = np.array([p.measured_us for p in of])
        order = np.argsort([p.predicted["us"] for p in of], kind="stable")
        first, ten = times[order[0]], times[order[:10]].min()
        cells = (first, ten, times.mean(), times.max())
        figures = " | ".join(f"{t / times.min():.2f}×" for t in cells)
        signed = np.mean([p.error for p in of])
        if name.endswith(ALL_FAMILIES):
            picks[policy].append(first / times.min())
        yield f"| {name} | {problem} | {policy} | {len(of)} | {rho(of):.2f} | {figures} | {signed:+.1%} |"
    for policy, ratios in picks.items():
        mean, most = statistics.mean(ratios), max(ratios)
        yield f"\nFirst picks over all families, {policy}: {len(ratios)} problems, mean {mean:.3f}×, worst {most:.2f}×."


def simplest(pairs: Sequence[Pair], holds: Mapping[str, tuple[int, int]]) -> Iterator[str]:
    """Yield a table of what it costs to take the simplest kernel of predictions near the fastest one, as `best` does.

    `holds` has registers and shared memory of each row by its id; rows with a cold L2 count.
    """
    groups: dict[str, list[Pair]] = defaultdict(list)
    for pair in pairs:
        if pair.row["config"] and pair.policy == "cold":
            groups[pair.row["problem"]].append(pair)
    ranked = [sorted(of, key=lambda p: p.predicted["us"]) for of in groups.values() if len(of) >= LEAST_RANKED]
    yield "\n## The simplest of predictions near the fastest\n"
    yield f"Time over that of the measured best, on average and at most, over {len(ranked)} problems.\n"
    yield "| within | kernels | mean | worst |"
    yield "|---:|---:|---:|---:|"
    for margin in MARGINS if ranked else ():
        near = [[p for p in of if p.predicted["us"] <= (1 + margin) * of[0].predicted["us"]] for of in ranked]
        taken = [min(of, key=lambda p: holds[p.row["id"]]).measured_us for of in near]
        ratios = [us / min(p.measured_us for p in of) for us, of in zip(taken, ranked, strict=True)]
        held = statistics.mean(map(len, near))
        yield f"| {margin:.1%} | {held:.1f} | {statistics.mean(ratios):.3f} | {max(ratios):.2f} |"


def worst(pairs: Sequence[Pair]) -> Iterator[str]:
    yield "\n## Largest errors\n"
    yield "| set | problem | kernel | L2 | measured µs | predicted µs | error | clocks | bound |"
    yield "|---|---|---|---|---:|---:|---:|---:|---|"
    for p in sorted(pairs, key=lambda p: -abs(math.log1p(p.error)))[:WORST]:
        named = " | ".join((p.row["set"], p.row["problem"], p.row["kernel"][:60], p.policy))
        yield (
            f"| {named} | {p.measured_us:,.1f} | {p.predicted['us']:,.1f} | {p.error:+.0%} | {p.cycles_error:+.0%} "
            f"| {p.predicted['bound']} |"
        )


def sustained(results: Mapping[str, Sequence[Result]], rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    by_id = {row["id"]: row for row in rows}
    good = [m for m in results["sustained"] if "error" not in m]
    if not good:
        return
    warm = {m["id"]: statistics.median(m["warm_us"]) for m in results["rows"] if m.get("warm_us")}
    chip = find_chip(CHIP)
    yield "\n## Without a pause\n"
    yield "Predicted at the clock that the model gives tensor cores that run without a pause.\n"
    yield "| set | problem | kernel | µs | TFLOPS | alone µs | GHz | W | predicted µs | its GHz |"
    yield "|---|---|---|---:|---:|---:|---:|---:|---:|---:|"
    for m in good:
        row, last = by_id[m["id"]], m["sustained_us"][len(m["sustained_us"]) // 2 :]
        us, watts = statistics.median(last), [n["watts"] for n in m["nvml"] if n]
        p = row["predicted"]["warm"]
        ghz = chip.ghz(Clock(SUSTAINED), p["shares"].get("tensor", 0.0))
        predicted_us = p["clocks"] / ghz / 1e3 + chip.launch_us
        yield (
            f"| {row['set']} | {row['problem']} | {row['kernel'][:40]} | {us:,.1f} | {row['flops'] / us / 1e6:.0f} "
            f"| {warm.get(m['id'], math.nan):,.1f} | {m['sustained_ghz'][0]:.3f} "
            f"| {statistics.median(watts) if watts else math.nan:.0f} | {predicted_us:,.1f} | {ghz:.3f} |"
        )


def baselines(results: Mapping[str, Sequence[Result]], rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    of = [m for m in results["torch"] if "problem" in m]
    if not of:
        return
    by_id = {row["id"]: row for row in rows}
    best: dict[str, tuple[float, str]] = {}
    for m in results["rows"]:
        if m["id"] in by_id and "error" not in m:
            row, us = by_id[m["id"]], statistics.median(m["cold_us"])
            best[row["problem"]] = min(best.get(row["problem"], (math.inf, "")), (us, row["set"]))
    yield "\n## torch\n"
    yield "| problem | call | warm µs | cold µs | fastest of the rows, cold µs | its set |"
    yield "|---|---|---:|---:|---:|---|"
    for m in of:
        if "error" in m:
            yield f"| {m['problem']} | {m['name']} | {m['error'][:60]} | | | |"
            continue
        warm, cold = (statistics.median(m[f"{policy}_us"]) for policy in ("warm", "cold"))
        us, of_set = best.get(m["problem"], (math.nan, ""))
        yield f"| {m['problem']} | {m['name']} | {warm:,.1f} | {cold:,.1f} | {us:,.1f} | {of_set} |"


def disagreeing(results: Mapping[str, Sequence[Result]], rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield rows whose sampled outputs are not those of most configurations of the same problem."""
    by_id = {row["id"]: row for row in rows}
    groups: dict[tuple[str, str], list[tuple[str, np.ndarray]]] = defaultdict(list)
    for m in results["rows"]:
        row = by_id.get(m["id"])
        if row and (row["config"] or row["set"] == "fast.cu"):
            for output, values in m.get("samples", {}).items():
                groups[f"{row['set'].split()[0]} {row['problem']}", output].append((m["id"], np.array(values)))
    yield "\n## Outputs that differ from those of most kernels of the problem\n"
    odd = 0
    for (problem, output), of in groups.items():
        usual = np.median([v for _, v in of], axis=0)
        scale = float(np.sqrt(np.mean(np.square(usual)))) or 1.0
        for name, values in of:
            wrong = ~(np.abs(values - usual) <= DISAGREE * scale)
            if wrong.mean() > 0.02:
                odd += 1
                kernel = f"{by_id[name]['set']} {by_id[name]['kernel']}"
                yield f"- {problem}, {output}: {kernel}: {wrong.mean():.0%} of samples"
    yield "" if odd else "None."


def beside_references(
    results: Mapping[str, Sequence[Result]], rows: Sequence[Mapping[str, Any]], references: Sequence[Mapping[str, Any]]
) -> Iterator[str]:
    """Yield how many rows have the samples that their problems' references have, and those that have not."""
    by_id = {row["id"]: row for row in rows}
    wanted = {found["problem"]: found["samples"] for found in references if "samples" in found}
    right, lines = 0, []
    compared = [m for m in results["rows"] if by_id[m["id"]]["problem"] in wanted and "samples" in m]
    for m in compared:
        row = by_id[m["id"]]
        named = ", ".join((row["problem"], row["set"], row["kernel"]))
        wrong = []
        for output, values in wanted[row["problem"]].items():
            expected = np.array(values)
            scale = float(np.sqrt(np.mean(np.square(expected)))) or 1.0
            off = np.abs(np.array(m["samples"][output]) - expected) / scale
            if not (near := off <= DISAGREE).all():
                wrong.append(
                    f"- {named}, {output}: {1 - near.mean():.0%} of samples, by up to {off.max():.3g} of the rms"
                )
        right += not wrong
        lines += wrong
    yield "\n## Outputs beside references\n"
    yield f"{right} of {len(compared)} kernels agree in all samples of their outputs."
    yield from lines
