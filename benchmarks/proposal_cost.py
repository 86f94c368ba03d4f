"""What a proposal costs after many trials: `python benchmarks/proposal_cost.py --trials 1000 100000`.

Eight knobs of eight values, 16.8 million configurations of which the sampler breeds its candidates. So many earlier
trials are recalled, as by a search that is resumed. Given are the CPU time of each of 200 proposals after the first,
asking and telling together, the CPU time of recalling, and by how much the process has grown. Needs no GPU.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence

# One search keeps one core busy: more threads under it only fight for it.
for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

import numpy as np  # noqa: E402

from evoengine.records import Config, Value  # noqa: E402
from evoengine.search.proposer import PastTrial, Proposer  # noqa: E402
from evoengine.space.space import space_from_text  # noqa: E402

KNOBS = "abcdefgh"
SPACE = 'kernel = "none"\n[knobs]\nfamily = ["one"]\n' + "".join(f"{k} = [1, 2, 3, 4, 5, 6, 7, 8]\n" for k in KNOBS)
LAUNCH = "[launch.one]\nthreads = 32\ngrid = [1, 1, 1]\nshared = 0\n"
PROPOSALS = 200


class Nothing:
    """A problem and a GPU that a space's text does not ask for."""

    def variables(self) -> dict[str, Value]:
        return {}


def speed(config: Config) -> float:
    """Return a speed that falls with the distance from a point, and jumps with the sum of two knobs."""
    places = np.array([int(config[k]) for k in KNOBS])
    return float(100 - np.abs(places - 5).sum() - 3 * ((places[0] + places[1]) % 3))


def measure(trials: int) -> str:
    """Return a line of figures; for a process of its own, since memory once taken is not given back."""
    space = space_from_text(SPACE + LAUNCH, "cost", Nothing(), Nothing())
    drawn = {tuple(row) for row in np.random.default_rng(0).integers(1, 9, size=(trials + trials // 50, len(KNOBS)))}
    configs: list[Config] = [
        {"family": "one", **dict(zip(KNOBS, map(int, row), strict=True))} for row in sorted(drawn)[:trials]
    ]
    past = [PastTrial(n, config, (speed(config),), (), "random") for n, config in enumerate(configs)]
    before, begun = resident(), time.process_time()
    proposer = Proposer(space, "evolution", 1, past=past)
    recalled = time.process_time() - begun
    ms = []
    for _ in range(PROPOSALS + 1):
        begun = time.process_time()
        proposal = proposer.propose()
        assert proposal is not None
        value = speed(proposal.config)
        proposer.tell(proposal, (value,))
        ms.append(1e3 * (time.process_time() - begun))
    later = np.array(ms[1:])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    return (
        f"{trials:>9,} {later.mean():6.1f} {np.median(later):6.1f} {later.max():6.1f} {recalled:8.2f} "
        f"{resident() - before:8.1f} {peak:8.0f}"
    )


def resident() -> float:
    """Return the resident memory of this process in MB."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trials", type=int, nargs="+", default=[1000, 100_000], help="earlier trials")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if min(options.trials) < 1:
        print("error: --trials takes numbers of earlier trials, at least 1", file=sys.stderr)
        return 2
    if options.one:
        print(measure(options.trials[0]))
        return 0
    print("   trials   mean median   most recall s grown MB  peak MB   (CPU ms of a proposal)", flush=True)
    for trials in options.trials:
        subprocess.run([sys.executable, __file__, "--one", "--trials", str(trials)], check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
