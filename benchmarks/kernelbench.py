"""KernelBench's problems as folders, and what the gate says of the naive kernels that are written for them.

    python -m benchmarks.kernelbench FOLDER [NUMBER…] [--seconds 40]

FOLDER holds KernelBench/level1 of github.com/ScalingIntelligence/KernelBench (MIT). Each kernel is judged at its start
point by the executor of machine code, all of the gate's cases, within so many CPU seconds. Imported files are run.
"""

from __future__ import annotations

import argparse
import signal
import tempfile
import time
from pathlib import Path

from evoengine.errors import EvoengineError
from evoengine.formats.folder import write_folder
from evoengine.formats.importers import make_folder
from evoengine.gpu import find_gpu
from evoengine.paths import asset
from evoengine.records import CompiledCandidate
from evoengine.search.evaluators import make_plans
from evoengine.space.space import load_space
from evoengine.stages.compile import CompileFailed, compile_source
from evoengine.stages.gate import executor, judge_whole
from evoengine.stages.render import render
from evoengine.workloads.base import Target
from evoengine.workloads.folder import load_folder


def judged(file: Path, name: str, scratch: Path) -> str:
    """Return what became of one file."""
    made = make_folder(name, f"kernelbench:{file}")
    write_folder(made, scratch / name)
    if skeleton := [remark for remark in made.remarks if "skeleton" in remark]:
        return skeleton[0]
    workload = load_folder(scratch / name)
    target = Target(workload, workload.parse(workload.example), find_gpu("h100"))
    space = load_space(scratch / name / "space.toml", target.problem, target.gpu)
    source = render(target, space, space.starts[0], asset("templates"))
    contender = CompiledCandidate(0, source, compile_source(source, target.gpu.arch), space.starts[0])
    verdict = judge_whole(executor(contender), workload, make_plans(space, target, space.starts[0]), seed=7)
    return (
        f"{'correct' if verdict.correct else 'refused'}, {len(verdict.cases)} cases: {verdict.reason or 'all passed'}"
    )


def _late(*_: object) -> None:
    raise TimeoutError("it took longer")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("numbers", type=int, nargs="*")
    parser.add_argument("--seconds", type=float, default=40.0)
    asked = parser.parse_args()
    signal.signal(signal.SIGPROF, _late)
    for file in sorted(asked.folder.glob("*_*.py"), key=lambda path: int(path.name.split("_")[0])):
        number = int(file.name.split("_")[0])
        if asked.numbers and number not in asked.numbers:
            continue
        begin = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, asked.seconds)
        with tempfile.TemporaryDirectory() as scratch:
            try:
                found = judged(file, f"level1_{number}", Path(scratch))
            except (CompileFailed, EvoengineError, TimeoutError) as error:
                found = f"{type(error).__name__}: {error}"
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
        print(f"{number:3} {time.process_time() - begin:5.1f} s  {found}", flush=True)


if __name__ == "__main__":
    main()
