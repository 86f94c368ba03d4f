"""Kernels that faults are planted in: a drawn configuration of each family of each workload, and the starter folder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from evoengine import workloads
from evoengine.formats.folder import write_folder
from evoengine.formats.importers import starter
from evoengine.gpu import find_gpu
from evoengine.paths import asset
from evoengine.records import Binary, Config, Rejection
from evoengine.search.evaluators import make_plans
from evoengine.space.space import SearchSpace, load_space
from evoengine.stages.verify import CannotJudge
from evoengine.workloads.base import Target
from evoengine.workloads.folder import load_folder
from tests.support.kernel_gate import emulate, execute
from tests.support.mutants import Mutant


@dataclass(frozen=True)
class Subject:
    """A family whose kernels are mutated."""

    name: str
    target: Target
    space_file: Path
    families: tuple[str, ...] = ()

    @cached_property
    def space(self) -> SearchSpace:
        return load_space(self.space_file, self.target.problem, self.target.gpu, self.families)

    def configuration(self, seed: int) -> Config:
        return self.space.sample(np.random.default_rng(seed), 1)[0]


def find_subject(name: str, folder: Path) -> Subject:
    return next(s for s in subjects(folder, only=name.partition("/")[0]) if s.name == name)


def subjects(folder: Path, gpu: str = "h100", only: str | None = None) -> Iterator[Subject]:
    """Yield the subjects of all workloads and the starter folder, or those of `only` this workload and the folder."""
    for name, workload in sorted(workloads.workloads().items()):
        if only not in (None, name):
            continue
        file, problem = asset("search_spaces") / f"{name}.toml", workload.parse(workload.example)
        target = Target(workload, problem, find_gpu(gpu))
        for family in sorted({str(c["family"]) for c in load_space(file, problem, target.gpu).starts}):
            yield Subject(f"{name}/{family}", target, file, (family,))
    write_folder(starter("own"), folder / "own")
    own = load_folder(folder / "own")
    target = Target(own, own.parse(own.example), find_gpu(gpu))
    yield Subject("starter folder", target, folder / "own" / "space.toml")


def survives(subject: Subject, config: Config, mutant: Mutant, binary: Binary, seed: int) -> bool:
    """Return whether neither judge rejects the mutant. One that a judge cannot read is left to the other."""
    plans = make_plans(subject.space, subject.target, config)
    workload = subject.target.workload
    try:
        if not execute(workload, mutant.source, binary, plans, seed).correct:
            return False
    except CannotJudge:
        pass
    verdict = emulate(workload, mutant.source, plans, seed)
    return not isinstance(verdict, Rejection) and verdict.correct
