"""Launch one candidate once at full size, under a profiler or sanitizer; its argument is a pickled job."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

from evoengine.devices.cuda import CudaKernel
from evoengine.timing.bench import Bench

SECONDS = 250.0
"""time limit of the launch, which under a profiler includes its replays"""


def main(job: Path) -> None:
    target, contender = pickle.loads(job.read_bytes())
    bench = Bench(target)
    loaded = CudaKernel(contender.binary, contender.source.entry, contender.source.launch)
    bench.launch_once(loaded, contender, 0, SECONDS)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
