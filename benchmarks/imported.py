"""What the gate says of the kernels that importers write or take over.

    python -m benchmarks.imported KIND:FILE… [--seconds 60]

Each source is what `evoengine new --from` takes. The kernel is judged at its start point on a virtual H100 by the
executor of machine code, all of the gate's cases, within so many CPU seconds. Imported files are run.
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


def judged(source: str, name: str, scratch: Path, entry: str | None = None) -> str:
    """Return what became of one file. Raises EvoengineError where it is refused, CompileFailed."""
    made = make_folder(name, source, entry=entry)
    write_folder(made, scratch / name)
    if skeleton := [remark for remark in made.remarks if "skeleton" in remark]:
        return skeleton[0]
    workload = load_folder(scratch / name)
    target = Target(workload, workload.parse(workload.example), find_gpu("h100"))
    space = load_space(scratch / name / "space.toml", target.problem, target.gpu)
    text = render(target, space, space.starts[0], asset("templates"))
    contender = CompiledCandidate(0, text, compile_source(text, target.gpu.arch), space.starts[0])
    verdict = judge_whole(executor(contender), workload, make_plans(space, target, space.starts[0]), seed=7)
    return (
        f"{'correct' if verdict.correct else 'refused'}, {len(verdict.cases)} cases: {verdict.reason or 'all passed'}"
    )


def within(seconds: float, source: str, name: str, entry: str | None = None) -> str:
    """Return what became of one file, and the CPU seconds that it took, at most `seconds`."""
    signal.signal(signal.SIGPROF, _late)
    begin = time.process_time()
    signal.setitimer(signal.ITIMER_PROF, seconds)
    with tempfile.TemporaryDirectory() as scratch:
        try:
            found = judged(source, name, Path(scratch), entry)
        except (CompileFailed, EvoengineError, TimeoutError) as error:
            found = f"{type(error).__name__}: {error}"
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    return f"{time.process_time() - begin:5.1f} s  {found}"


def _late(*_: object) -> None:
    raise TimeoutError("it took longer")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="+")
    parser.add_argument("--entry")
    parser.add_argument("--seconds", type=float, default=60.0)
    asked = parser.parse_args()
    for source in asked.sources:
        print(f"{source.rpartition('/')[2]:44} {within(asked.seconds, source, 'imported', asked.entry)}", flush=True)


if __name__ == "__main__":
    main()
