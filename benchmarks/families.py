"""Whether a search on a machine without a GPU finds correct kernels of every family, and how long that takes.

    python benchmarks/families.py [--gpu h100] [--trials 60] [--json OUT]

Searches {full, causal} × {head_dim 64, 128} × {as many kv heads as heads, fewer}, each in a ledger of its own through
the public command line, one after the other. Speeds are estimates. Exit code 1 where a family that the GPU can
run was left without a correct candidate, or a search took longer than LIMIT_SECONDS.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from evoengine.errors import UsageError  # noqa: E402
from evoengine.gpu import find_gpu  # noqa: E402
from evoengine.paths import asset  # noqa: E402
from evoengine.space.space import load_space  # noqa: E402
from evoengine.workloads.attention.problem import parse_problem  # noqa: E402

PROBLEMS = tuple(
    f"b2,h8,s1024,d{head_dim},fp16{mask}{heads}"
    for mask, head_dim, heads in product(("", ",causal"), (64, 128), ("", ",kv2"))
)
LIMIT_SECONDS = 300.0


@dataclass(frozen=True)
class Found:
    """What a search has of one family."""

    trials: int
    correct: int
    best: float | None
    """TFLOPS of the best correct candidate, estimated; None where there is none"""
    by_formula: bool = False
    """whether none of them could be predicted from its machine code"""


@dataclass(frozen=True)
class Search:
    problem: str
    seconds: float
    """wall clock of the whole command"""
    trials: int
    families: dict[str, Found]
    """those that the GPU can run"""

    @property
    def good(self) -> bool:
        return self.seconds <= LIMIT_SECONDS and all(f.correct for f in self.families.values())


def search(problem: str, gpu: str, trials: int, seed: int) -> Search:
    """One search of the emulator by the command line, in a ledger that is thrown away."""
    with tempfile.TemporaryDirectory(prefix="evoengine-") as folder:
        ledger = ("--db", str(Path(folder, "evo.db")), "--json")
        target = ("--gpu", gpu, "--problem", problem, "--device", "emulator")
        begun = time.monotonic()
        evoengine("search", *target, "--trials", str(trials), "--seed", str(seed), *ledger)
        seconds = time.monotonic() - begun
        candidates = json.loads(evoengine("history", *ledger))["trials"]
    return Search(problem, round(seconds, 1), len(candidates), by_family(candidates, families_for(problem, gpu)))


def evoengine(*arguments: str) -> str:
    done = subprocess.run([sys.executable, "-m", "evoengine", *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode not in (0, 1):
        sys.exit(done.returncode)
    return done.stdout


def families_for(problem: str, gpu: str) -> list[str]:
    space = load_space(asset("search_spaces") / "attention.toml", parse_problem(problem), find_gpu(gpu))
    return [f for f in space.families if f not in space.empty_families]


def by_family(candidates: Sequence[dict], families: Sequence[str]) -> dict[str, Found]:
    """`candidates` as `evoengine history --json` gives them."""
    found = {}
    for family in families:
        own = [c for c in candidates if c["config"]["family"] == family]
        correct = [c for c in own if c["correct"]]
        figures = [c for c in correct if c["tflops"]]
        predicted = [c["tflops"] for c in figures if c["model"] != "formula"]
        best = max(predicted or [c["tflops"] for c in figures], default=None)
        found[family] = Found(len(own), len(correct), best, by_formula=bool(figures) and not predicted)
    return found


def table(searches: Sequence[Search], gpu: str) -> Table:
    names = list(dict.fromkeys(f for s in searches for f in s.families))
    title = f"correct of tried, and best estimated TFLOPS, on {gpu} without a GPU"
    out = Table(title=title, caption="est.: estimates, not measurements; est.* by formula")
    for name in ("problem", "s", "trials", *names):
        out.add_column(name, no_wrap=True, justify="left" if name == "problem" else "right")
    for s in searches:
        cells = [cell(s.families[name]) if name in s.families else "" for name in names]
        out.add_row(s.problem, f"{s.seconds:.0f}", str(s.trials), *cells)
    return out


def cell(found: Found) -> str:
    return f"{found.correct} of {found.trials}" + (
        f", {found.best:,.4g} est.{'*' * found.by_formula}" if found.best else ""
    )


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gpu", default="h100", help="what to compile for (default: h100)")
    parser.add_argument("--problems", nargs="+", default=PROBLEMS, help="in place of the eight")
    parser.add_argument(
        "--trials", type=int, default=60, help="candidates per search (default: 60, as evoengine search)"
    )
    parser.add_argument("--seed", type=int, default=1, help="of every search (default: 1)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the figures here")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parsed(arguments)
    try:
        for problem in options.problems:
            families_for(problem, options.gpu)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    searches = []
    for problem in options.problems:
        searches.append(search(problem, options.gpu, options.trials, options.seed))
        print(f"{problem}: {searches[-1].seconds:.0f} s", file=sys.stderr)
    Console(width=140).print(table(searches, options.gpu))
    if options.json:
        options.json.write_text(json.dumps([asdict(s) for s in searches], indent=1) + "\n")
    return 0 if all(s.good for s in searches) else 1


if __name__ == "__main__":
    sys.exit(main())
