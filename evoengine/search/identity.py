"""What an evaluation depends on. Where all of it is the same, the result is reused.

A change of the driver, the compiler, a library, the gate's version or the model's is another environment. The seed of
the inputs is not part of it, nor are a search's objectives. Verdicts and rankings belong to a kernel: its reference,
its definition and its text.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from evoengine.objectives import DEFAULT, OBJECTIVES, Objective
from evoengine.paths import package_folder
from evoengine.records import GATE_VERSION, Config, Device, Plans, Source
from evoengine.sass.predict import MODEL_VERSION
from evoengine.space.space import SearchSpace
from evoengine.stages.compile import options
from evoengine.stages.render import Fill, fill
from evoengine.stages.toolchain import compiler_version
from evoengine.workloads.base import AnyWorkload, Target

# The settings of a search.


@dataclass(frozen=True, slots=True)
class Setting:
    """The problem, place and limits of a search."""

    target: Target
    space: SearchSpace
    templates: Path
    sampler: str
    seed: int
    trials: int
    seconds: float | None
    jobs: int
    timed: bool
    """whether a GPU times the candidates, so that spills are left to the timing"""
    objectives: tuple[Objective, ...] = (OBJECTIVES[DEFAULT],)
    fill: Fill = fill
    remeasure: bool = False
    """whether results in the ledger are not reused"""
    first: tuple[Config, ...] = ()
    """configurations that are evaluated before all others"""


LIBRARIES = ("torch", "numpy")
TEMPLATES = (".j2", ".cu", ".cuh", ".h", ".hpp", ".json", ".py", ".toml")
"""suffixes of files from which a kernel may be rendered"""
KERNEL_TEXTS = (".j2", ".cu", ".cuh", ".h", ".hpp")
INCLUDED_TEXTS = (".j2", ".cuh", ".h", ".hpp")
"""suffixes in folders below a kernel's own, where a `.cu` may be an export"""
NOT_IDENTIFYING = ("space", "description", "op_type", "tags", "file", "sizes")
"""keys of a definition that change neither what is computed nor how it is judged"""


def digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def digest_of_files(folder: Path, files: Iterable[Path]) -> str:
    """Return a digest of the names and contents of files."""
    return digest(
        {str(f.relative_to(folder)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files if f.is_file()}
    )


def kernel_identity(workload: AnyWorkload) -> str | None:
    """Return the sha256 of a user's own kernel, over reference, definition and text; None for other workloads.

    Verdicts and figures of one identity are ranked together. The search space is not part of it.
    """
    if workload.definition_text is None:
        return None
    stated = json.loads(workload.definition_text)
    for name in NOT_IDENTIFYING:
        stated.pop(name, None)
    folder = workload.templates()
    if folder is None:
        return digest(stated)
    texts = [f for f in folder.glob("*") if f.suffix in KERNEL_TEXTS]
    included = [f for f in folder.rglob("*") if f.parent != folder and f.suffix in INCLUDED_TEXTS]
    return digest([stated, digest_of_files(folder, (*texts, *included))])


def templates_digest(setting: Setting) -> str:
    """Return a digest of the templates that the search renders, with their includes."""
    workload = setting.target.workload
    if workload.host is not None:
        return digest(workload.host.text)
    folders = [setting.templates, *filter(None, [workload.templates()])]
    return digest([digest_of_files(f, (p for p in f.rglob("*") if p.suffix in TEMPLATES)) for f in folders])


def environment(setting: Setting, device: Device, predicted: bool) -> dict[str, Any]:
    """Return everything that all evaluations of a search depend on.

    `predicted` states whether times come from machine code.
    """
    triton = ("triton",) if setting.target.workload.host else ()
    libraries = {name: version(name) for name in (*LIBRARIES, *triton)}
    return {
        "device": [device.name, device.arch],
        "driver": device.driver,
        "libraries": libraries | dict(device.versions),
        "compiler": compiler_version(),
        "gate": GATE_VERSION,
        "model": MODEL_VERSION,
        "predicted": predicted,
        "clock": str(setting.target.clock) if predicted and not setting.timed else None,
    }


class Identity:
    """Computes the key of the evaluation of each kernel of a search."""

    def __init__(self, setting: Setting, environment: Mapping[str, Any]) -> None:
        target = setting.target
        self._setting = setting
        self._base = digest(
            {
                "environment": dict(environment),
                "timed": setting.timed,
                "gpu": repr(target.gpu),
                "problem": str(target.problem),
                "workload": _workload(target.workload),
                "options": options(target.gpu.arch),
            }
        )

    def key(self, source: Source, config: Config, plans: Plans) -> str:
        """Return the key of a claim as SHA-256 in hexadecimal.

        Of the configuration it covers the launches, the cost and the parameters of each case.
        """
        space, target = self._setting.space, self._setting.target
        cases = [*plans.short, *plans.long, *plans.full]
        of_this = {
            "base": self._base,
            "source": source.sha256,
            "entry": source.entry,
            "launch": repr(source.launch),
            "cost": space.cost(config),
            "parameters": repr(target.workload.parameters(target.problem, config)),
            "cases": [(repr(_without_config(case)), repr(launch)) for case, launch in cases],
        }
        return digest(of_this)


def _workload(workload: AnyWorkload) -> list[object]:
    """Return what identifies a workload: the definition in a folder, or the module of a registered class."""
    stated = json.loads(workload.definition_text) if workload.definition_text else {}
    stated.pop("space", None)
    module = Path(inspect.getsourcefile(type(workload)) or "")
    own = module.is_relative_to(package_folder()) or not module.is_file()
    return [workload.name, stated, "" if own else hashlib.sha256(module.read_bytes()).hexdigest()]


def _without_config(case: Any) -> Any:
    if is_dataclass(case) and not isinstance(case, type) and "config" in {f.name for f in fields(case)}:
        return replace(case, config={})
    return case
