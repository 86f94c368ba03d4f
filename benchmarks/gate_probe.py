"""Notes the CPU seconds of each call of the gate. gate_time.py has every process of a search import it at its start, as
`sitecustomize`, of this checkout and of older ones.

CPU seconds are those of the process and of the compilers and emulators that it awaited; what is built once for a
machine is left out. Each call is a line of JSON in the file $GATE_PROBE: kernel, family, seconds.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

GATE = {
    "evoengine.stages.gate": ("Judges.judge_short", "Judges.judge_rest"),
    "evoengine.stages.tasks": ("emulate_task", "execute_task"),  # before executor and emulator were judges alike
}
BUILT_ONCE = {"evoengine.cuda_emulator.build": ("_runtime", "build_runtime"), "evoengine.sass.build": ("build",)}
_once = 0.0
"""seconds that what is built once has taken in this process"""


def _seconds() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def _kernel_and_family(arguments: tuple[Any, ...]) -> tuple[str, str]:
    if hasattr(arguments[0], "_contender"):
        source, plan = arguments[0]._contender.source, arguments[0]._plans.short
    else:
        source, plan = arguments[1], next(a for a in arguments if isinstance(a, list))
    return source.sha256, str(plan[0][0].config.get("family"))


def _noted(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def wrapper(*arguments: Any) -> Any:
        start, once = _seconds(), _once
        try:
            return call(*arguments)
        finally:
            row = (*_kernel_and_family(arguments), _seconds() - start - (_once - once))
            with open(os.environ["GATE_PROBE"], "a", encoding="utf-8") as out:
                out.write(json.dumps(row) + "\n")

    return wrapper


def _left_out(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def wrapper(*arguments: Any) -> Any:
        global _once
        start = _seconds()
        try:
            return call(*arguments)
        finally:
            _once += _seconds() - start

    return wrapper


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        wrap, names = (_noted, GATE[name]) if name in GATE else (_left_out, BUILT_ONCE.get(name, ()))
        spec = importlib.machinery.PathFinder.find_spec(name, path) if names else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            for dotted in names:
                *owners, last = dotted.split(".")
                owner = functools.reduce(lambda found, part: getattr(found, part, None), owners, module)
                if hasattr(owner, last):
                    setattr(owner, last, wrap(getattr(owner, last)))

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if "GATE_PROBE" in os.environ:
    sys.meta_path.insert(0, _Finder())
