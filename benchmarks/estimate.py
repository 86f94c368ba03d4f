"""How well estimates rank: against what was measured, or against what is known of other kernels.

    python benchmarks/estimate.py WHERE [WHERE …]    measured: ledgers (file or URL), results of benchmarks/gpu.py,
                                                     what `evoengine measure --json` printed
    python benchmarks/estimate.py --published        recorded elsewhere: see PUBLISHED; compiles, needs no GPU

Prints Spearman's ρ between estimated and measured TFLOPS per problem and GPU, for all candidates and per family,
predictions from machine code and estimates by formula each for themselves, and
the regret: by how much the best of all beats the best of those that the 10 best estimates would have chosen.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from evoengine.errors import EvoengineError, UsageError  # noqa: E402
from evoengine.gpu import find_gpu  # noqa: E402
from evoengine.ledger.store import open_ledger  # noqa: E402
from evoengine.paths import asset  # noqa: E402
from evoengine.records import CompiledCandidate, Config, Measurement  # noqa: E402
from evoengine.space.space import load_space  # noqa: E402
from evoengine.stages.compile import compile_source  # noqa: E402
from evoengine.stages.predict import estimate, predict_figure  # noqa: E402
from evoengine.stages.render import render  # noqa: E402
from evoengine.tuning.measure import SHORT_LIST, Agreement, Pair, measured_pairs, rank_agreement  # noqa: E402
from evoengine.workloads import parse_problem  # noqa: E402
from evoengine.workloads.attention.problem import EXAMPLE  # noqa: E402
from evoengine.workloads.base import Target  # noqa: E402

# ── against what was measured ───────────────────────────────────────────────────────────────────────────────────────


def read(where: str) -> list[Pair]:
    """Raises UsageError where nothing was measured, or nothing of it has an estimate beside it."""
    if where.endswith(".json"):
        return read_results(Path(where))
    with open_ledger(where, create=False) as ledger:
        pairs = measured_pairs(ledger)
    return pairs or _nothing(where)


def read_results(path: Path) -> list[Pair]:
    try:
        found = json.loads(path.read_text())
        pairs = [Pair(**pair) for part in found.get("problems", [found]) for pair in part["estimates"]]
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UsageError(
            f"{path} has no list `estimates`: it takes what benchmarks/gpu.py or evoengine measure --json wrote"
        ) from None
    return pairs or _nothing(str(path))


def _nothing(where: str) -> list[Pair]:
    raise UsageError(
        f"no measured trials in {where} that have an estimate: evoengine measure times what a search without a GPU left"
    )


@dataclass(frozen=True)
class Row:
    problem: str
    gpu: str
    device: str
    policy: str
    model: str
    """that estimated"""
    family: str
    """or `all`"""
    agreement: Agreement


def rows(pairs: Sequence[Pair]) -> Iterator[Row]:
    """Per problem, GPU, device, policy and what estimated: all families together, then each."""

    def target(pair: Pair) -> tuple[str, str, str, str, str]:
        return pair.problem, pair.gpu, pair.device, pair.policy, pair.model

    for key, group in groupby(sorted(pairs, key=target), key=target):
        own = list(group)
        for family in ("all", *dict.fromkeys(p.family for p in own)):
            yield Row(*key, family, rank_agreement([p.figures for p in own if family in ("all", p.family)]))


def table(found: Sequence[Row]) -> Table:
    regret = f"regret: speed missed by timing only the {SHORT_LIST} best estimates"
    out = Table(title="estimated against measured order", caption=regret)
    for name in ("problem", "compiled for", "measured on", "estimated by", "family", "candidates", "ρ", "regret"):
        out.add_column(name, no_wrap=True, justify="right" if name in ("candidates", "ρ", "regret") else "left")
    for row in found:
        a = row.agreement
        rho = "–" if a.spearman is None else f"{a.spearman:.2f}"
        regret = "–" if a.regret is None else f"{a.regret:.1%}"
        out.add_row(
            row.problem, row.gpu, f"{row.device}\n{row.policy}", row.model, row.family, str(a.candidates), rho, regret
        )
    return out


# ── against what was published ──────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Published:
    """Somebody's kernel, the start point that makes its choices, and its TFLOPS on an H100 SXM by problem."""

    name: str
    start: Config
    tflops: dict[str, float]


def _shape(head_dim: int, seq: int, causal: bool = False) -> str:
    """16,384 tokens in all and 2,048 columns in all heads together, as the FlashAttention benchmarks have it."""
    return f"b{16384 // seq},h{2048 // head_dim},s{seq},d{head_dim},fp16" + ",causal" * causal


FA2_64 = {"family": "mma", "tile_m": 128, "tile_n": 112, "warps": 4}
FA2_128 = {"family": "mma", "tile_m": 128, "tile_n": 64, "warps": 4, "stages": 1}
FA2_256 = {"family": "mma", "tile_m": 128, "tile_n": 96, "warps": 8}
FA3_64 = {"family": "wgmma", "tile_m": 192, "tile_n": 128, "overlap": True}
FA3_128 = {"family": "wgmma", "tile_m": 128, "tile_n": 176}
FA3_128_CAUSAL = {"family": "wgmma", "tile_m": 128, "tile_n": 128}
FA3_256 = {"family": "wgmma", "tile_m": 128, "tile_n": 80}
HAND = {"family": "wmma", "tile_m": 64, "tile_n": 64, "warps": 8, "pad": 16, "stages": 2}
# FlashAttention-3's paper (Shah et al. 2024, arXiv:2407.08608): H100 80GB SXM5, fp16 forward. The first is no
# publication, but the kernel that this project started from.
PUBLISHED = (
    Published("hand-written WMMA", HAND, {EXAMPLE: 10.87}),
    Published("FlashAttention-2", FA2_64, {_shape(64, 2048): 318, _shape(64, 8192): 322}),
    Published("FlashAttention-2", FA2_64, {_shape(64, 2048, True): 262, _shape(64, 8192, True): 295}),
    Published("FlashAttention-2", FA2_128, {_shape(128, 2048): 362, _shape(128, 8192): 370}),
    Published("FlashAttention-2", FA2_128, {_shape(128, 2048, True): 298, _shape(128, 8192, True): 333}),
    Published("FlashAttention-2", FA2_256, {_shape(256, 2048): 321, _shape(256, 8192): 326}),
    Published("FlashAttention-3", FA3_64, {_shape(64, 2048): 460, _shape(64, 8192): 496}),
    Published("FlashAttention-3", FA3_64, {_shape(64, 2048, True): 371, _shape(64, 8192, True): 460}),
    Published("FlashAttention-3", FA3_128, {_shape(128, 2048): 625, _shape(128, 8192): 646}),
    Published("FlashAttention-3", FA3_128_CAUSAL, {_shape(128, 2048, True): 521, _shape(128, 8192, True): 602}),
    Published("FlashAttention-3", FA3_256, {_shape(256, 2048): 707, _shape(256, 8192): 746}),
)


def estimates(known: Published) -> Iterator[tuple[Measurement, Measurement]]:
    """The figures of the first start point with these values, compiled for an H100, by problem: by what evoengine
    takes, the model of the chip, and by formula."""
    gpu, binary = find_gpu("h100"), None
    for problem in known.tflops:
        target = Target(*parse_problem(problem), gpu)
        space = load_space(asset("search_spaces") / "attention.toml", target.problem, gpu)
        config = next(c for c in space.starts if known.start.items() <= c.items())
        source = render(target, space, config, asset("templates"))
        # lengths are arguments of the kernel, so that one binary serves them all
        binary = binary or compile_source(source, gpu.arch)
        cost = space.cost(config)
        found = predict_figure(target, CompiledCandidate(0, source, binary, config), cost)
        yield found.figure, estimate(binary, source.launch, cost, gpu, target.flops, target.min_dram_bytes)


def published_table() -> Table:
    out = Table(caption="rec.: theirs, on an H100; est.: for this project's kernel of that design; * by formula")
    for name in ("kernel", "problem", "recorded", "estimated", "ratio", "by formula", "ratio"):
        out.add_column(name, no_wrap=True, justify="left" if name in ("kernel", "problem") else "right")
    pairs = []
    for known in PUBLISHED:
        for (problem, recorded), both in zip(known.tflops.items(), estimates(known), strict=True):
            pairs.append((*(m.tflops for m in both), recorded))
            cells = [
                text
                for m in both
                for text in (f"{m.tflops:.4g} est.{'*' * m.by_formula}", f"{m.tflops / recorded:.2f}")
            ]
            out.add_row(known.name, problem, f"{recorded:.4g} rec.", *cells)
    by_model, by_formula = (rank_agreement([(row[i], row[-1]) for row in pairs]).spearman for i in (0, 1))
    out.title = (
        f"estimates against {len(pairs)} recorded figures: Spearman's ρ {by_model:.2f}, by formula {by_formula:.2f}"
    )
    return out


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("where", nargs="*", metavar="WHERE", help="ledgers and results, measured")
    parser.add_argument("--published", action="store_true", help="compare with published figures instead")
    options = parser.parse_args(arguments)
    if bool(options.where) == options.published:
        parser.error("give ledgers or results to read, or --published")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parsed(arguments)
    console = Console(width=140)
    if options.published:
        console.print(published_table())
        return 0
    try:
        pairs = [pair for where in options.where for pair in read(where)]
    except EvoengineError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    console.print(table(list(rows(pairs))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
