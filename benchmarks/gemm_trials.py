"""How near short searches of a GEMM come to the best configuration that is known: predicted times, many seeds.

    python benchmarks/gemm_trials.py [--seeds 20] [--trials 24] [--no-starts] [--cache FILE]

Each search proposes as `evoengine search` does, begins with the space's start points unless --no-starts is given, and
is told the predicted time of each binary; the gate is left out, since the families are right. The best known is the
best of all searches and start points. Nothing is measured on a GPU.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

from evoengine.gpu import find_gpu  # noqa: E402
from evoengine.paths import asset  # noqa: E402
from evoengine.records import CompiledCandidate, Config, config_key  # noqa: E402
from evoengine.sass.predict import Unpredictable  # noqa: E402
from evoengine.search.proposer import Proposer  # noqa: E402
from evoengine.space.space import SearchSpace, load_space, space_from_text  # noqa: E402
from evoengine.stages.compile import CompileFailed, compile_source  # noqa: E402
from evoengine.stages.predict import predict_binary  # noqa: E402
from evoengine.stages.render import render  # noqa: E402
from evoengine.stages.screen import screen_binary, screen_launch  # noqa: E402
from evoengine.workloads import parse_problem  # noqa: E402
from evoengine.workloads.base import Target  # noqa: E402

PROBLEM, GPU = "gemm:m4096,n4096,k4096,bf16", "h100"
TARGET = Target(*parse_problem(PROBLEM), find_gpu(GPU))
NEAR = 0.97


class Predictor:
    """Predicted microseconds of configurations; what was predicted before is read from a file of JSON lines."""

    def __init__(self, space: SearchSpace, file: Path | None) -> None:
        self._space, self._file = space, file
        lines = file.read_text("utf-8").splitlines() if file and file.exists() else []
        self.known: dict[str, float | None] = dict(json.loads(line) for line in lines)

    def __call__(self, config: Config) -> float | None:
        """Return None where a screen or the compiler rejects the configuration, or the model cannot read it."""
        key = config_key(config)
        if key not in self.known:
            self.known[key] = self._predicted(config)
            if self._file:
                with self._file.open("a", encoding="utf-8") as out:
                    out.write(json.dumps([key, self.known[key]]) + "\n")
        return self.known[key]

    def _predicted(self, config: Config) -> float | None:
        source = render(TARGET, self._space, config, asset("templates"))
        if screen_launch(source.launch, TARGET.gpu):
            return None
        try:
            binary = compile_source(source, TARGET.gpu.arch)
            if screen_binary(binary, source, TARGET.gpu, self._space.cost(config), timed=False):
                return None
            return predict_binary(TARGET, CompiledCandidate(0, source, binary, config)).time_us
        except (CompileFailed, Unpredictable):
            return None


def best_of(space: SearchSpace, predicted: Predictor, seed: int, trials: int) -> float:
    """Return the least predicted time of a search's trials; infinite where all were rejected."""
    proposer, best = Proposer(space, "evolution", seed), np.inf
    for _ in range(trials):
        proposal = proposer.propose()
        if proposal is None:
            break
        us = predicted(proposal.config)
        proposer.tell(proposal, None if us is None else [1 / us])
        best = min(best, us or np.inf)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--trials", type=int, default=24)
    parser.add_argument("--no-starts", action="store_true", help="leave the space's start points out")
    parser.add_argument("--cache", type=Path, help="keep predictions in FILE, and read them from there")
    options = parser.parse_args()
    file = asset("search_spaces") / "gemm.toml"
    space = load_space(file, TARGET.problem, TARGET.gpu)
    predicted = Predictor(space, options.cache)
    times = [predicted(start) for start in space.starts]
    if options.no_starts:
        text = re.sub(r"^start = \[\n.*?^\]\n", "", file.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
        space = space_from_text(text, file.name, TARGET.problem, TARGET.gpu)
    found = []
    for seed in range(options.seeds):
        found.append(best_of(space, predicted, seed, options.trials))
        print(f"seed {seed}: {found[-1]:.2f} µs", file=sys.stderr, flush=True)
    best = min(us for us in [*predicted.known.values(), *times] if us)
    shares = best / np.array(found)
    low, median, high = np.quantile(shares, (0.25, 0.5, 0.75))
    print(f"{PROBLEM} on {GPU}: best known {best:.2f} µs, {TARGET.flops / best / 1e6:.0f} TFLOPS predicted")
    print(f"after {options.trials} trials, {options.seeds} seeds: {median:.3f} of it in the median, quartiles")
    print(f"{low:.3f} to {high:.3f}; {np.mean(shares >= NEAR):.0%} of the searches reach {NEAR:.0%}")


if __name__ == "__main__":
    main()
