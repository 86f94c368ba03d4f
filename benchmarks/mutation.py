"""Kill rates of the gate: mutants of every family and of the starter folder that the judges reject.

    .venv/bin/python -m benchmarks.mutation [--seeds 1 2 3] [--count 20] [--only attention/mma] [--survivors FILE]

A mutant has one small fault at a place drawn by seed (`tests/support/mutants.py`) and other machine code than its
original, which is a configuration of the family drawn by the same seed. It is killed where the executor or the emulator
rejects it on its whole plan of cases. Survivors are judged by hand, one line each, in `mutation_survivors.toml`:
equivalent (no input distinguishes it from its original), latent (no device or problem within the promise shows the
fault) or open. The rate leaves equivalent mutants out. Survivors without a line there count as open.
"""

from __future__ import annotations

import argparse
import tempfile
import tomllib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from evoengine.paths import asset
from evoengine.stages.compile import compile_source
from evoengine.stages.render import render
from tests.support.mutants import Mutant, mutants
from tests.support.subjects import Subject, subjects, survives

SURVIVORS = Path(__file__).with_name("mutation_survivors.toml")
JUDGEMENTS = ("equivalent", "latent", "open")


@dataclass
class Tally:
    made: int = 0
    killed: int = 0
    survivors: list[Mutant] = field(default_factory=list)
    judged: Counter[str] = field(default_factory=Counter)

    @property
    def rate(self) -> float:
        return self.killed / max(1, self.made - self.judged["equivalent"])


def judgement(subject: Subject, mutant: Mutant, known: dict[str, str]) -> str:
    said = known.get(f"{subject.name}: {mutant.text}", "open")
    return next(j for j in JUDGEMENTS if said.startswith(j))


def main() -> None:
    args = _arguments()
    known = tomllib.loads(SURVIVORS.read_text()) if SURVIVORS.exists() else {}
    with tempfile.TemporaryDirectory() as scratch:
        for subject in subjects(Path(scratch)):
            if args.only and not subject.name.startswith(args.only):
                continue
            for seed in args.seeds:
                tally = _tally(subject, seed, args.count, known)
                print(
                    f"{subject.name:<22} seed {seed}: {tally.killed} of {tally.made} killed, {dict(tally.judged)},"
                    f" {tally.rate:.1%} of what is not equivalent",
                    flush=True,
                )
                for mutant in tally.survivors:
                    print(f"    {subject.name}: {mutant}", flush=True)


def _tally(subject: Subject, seed: int, count: int, known: dict[str, str]) -> Tally:
    config = subject.configuration(seed)
    source = render(subject.target, subject.space, config, asset("templates"))
    arch = subject.target.gpu.arch
    tally = Tally()
    for mutant, binary in mutants(source, arch, compile_source(source, arch), count, seed):
        tally.made += 1
        if survives(subject, config, mutant, binary, seed):
            tally.survivors.append(mutant)
            tally.judged[judgement(subject, mutant, known)] += 1
        else:
            tally.killed += 1
    return tally


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--count", type=int, default=20, help="mutants per family and seed")
    parser.add_argument("--only", help="families whose name begins so: attention/mma")
    return parser.parse_args()


if __name__ == "__main__":
    main()
