"""evoengine verify --triton: every configuration of a Triton kernel through the gate."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import torch
import triton
from triton.runtime.errors import OutOfResources

from evoengine.errors import UsageError
from evoengine.sass.predict import MODEL_VERSION, Prediction
from evoengine.views.encoding import SCHEMA
from evoengine.virtual.device import VirtualGpuError, virtual_gpu
from evoengine.virtual.gate import ConfigVerdict, GatingGpu
from evoengine.virtual.triton_driver import install, uninstall
from evoengine.virtual.triton_file import TritonKernel, config_text, function_of, load, require_names, said, sizes_of

ODD_SIZES = 3
"""sets of sizes that are drawn"""
LARGEST_ODD = 300


def verify(
    target: str, call: str, reference: str | None, gpu: str, seed: int, exact: bool = False
) -> list[ConfigVerdict]:
    """Gate every configuration of the kernel that `target`, FILE::KERNEL, names.

    `call` names a function of the file that launches the kernel on tensors of its own, `reference` one that takes
    parameters of the kernel by name and returns what it writes. With `exact`, each configuration is also built in
    Triton's exact algebra and compared with the first, which says nothing about its verdict. Raises UsageError where a
    function is missing, raises for its own sizes, or launches no such kernel, and where Triton has no exact algebra.
    """
    if exact and not hasattr(triton.knobs.compilation, "fpsan_homomorphic_casts"):
        raise UsageError(f"--exact needs FpSan of Triton 3.9; this is Triton {triton.__version__}")
    file, separator, name = target.partition("::")
    if not separator or not name:
        raise UsageError(f"--triton takes FILE::KERNEL, and {target!r} names no kernel")
    device = virtual_gpu(gpu)
    path = Path(file)
    module = load(path)
    kernel, function = TritonKernel(module, name), function_of(module, call, "--call")
    truth = function_of(module, reference, "--reference") if reference else None
    names = require_names(truth, kernel) if truth else ()
    gating = GatingGpu(device.gpu, device.chip, kernel, truth, names, seed)
    cases = _cases(sizes_of(function, call), seed)
    install(gating)
    verdicts = []
    try:
        for config in kernel.configs:
            gating.verdict = ConfigVerdict(config_text(config))
            with kernel.only(config):
                _run_cases(gating, function, cases, path)
                if exact and not gating.verdict.wrong:
                    _run_exactly(gating, function, cases)
            verdicts.append(gating.verdict)
    finally:
        uninstall()
    return verdicts


def _run_cases(gating: GatingGpu, function: Callable[..., Any], cases: list[dict[str, int]], path: Path) -> None:
    """Call the function with each set of sizes, until one of its launches is wrong."""
    for number, sizes in enumerate(cases):
        gating.sizes, gating.launches = _text(sizes), 0
        try:
            with _uninitialized_as_nan(), warnings.catch_warnings():
                torch.manual_seed(gating.seed_of(number))
                function(**sizes)
        except OutOfResources as error:
            gating.verdict.refused[gating.sizes] = str(error)
        except (UsageError, VirtualGpuError) as error:
            if isinstance(error, UsageError) or gating.verdict.wrong is None:
                raise UsageError(str(error)) from None
            return
        except Exception as error:
            if not number:
                raise UsageError(f"{function.__name__}({gating.sizes}) raises {said(error, path)}") from None
            gating.verdict.refused[gating.sizes] = said(error, path)
        else:
            if not gating.launches:
                raise UsageError(f"{function.__name__}({gating.sizes}) launches no kernel {gating.kernel.name}")


def _run_exactly(gating: GatingGpu, function: Callable[..., Any], cases: list[dict[str, int]]) -> None:
    """Call the function with each set of sizes that it took, with launches of the build in exact algebra."""
    before, triton.knobs.compilation.instrumentation_mode = triton.knobs.compilation.instrumentation_mode, "fpsan"
    gating.exact = True
    try:
        for number, sizes in enumerate(cases):
            gating.sizes, gating.launches = _text(sizes), 0
            if gating.sizes in gating.verdict.refused:
                continue
            try:
                with _uninitialized_as_nan():
                    torch.manual_seed(gating.seed_of(number))
                    function(**sizes)
            except Exception as error:  # what the function makes of such results may be anything
                if not gating.launches:
                    gating.verdict.unbuilt[gating.sizes] = str(error)
    finally:
        gating.exact = False
        triton.knobs.compilation.instrumentation_mode = before


def _text(sizes: dict[str, int]) -> str:
    return " ".join(f"{name}={value}" for name, value in sizes.items())


def _cases(sizes: dict[str, int], seed: int) -> list[dict[str, int]]:
    """Return the function's own sizes, then all of 1, each of its own less one, and drawn odd ones; each set once."""
    random = np.random.default_rng(seed)
    found = [sizes]
    if sizes:
        found += [dict.fromkeys(sizes, 1), {name: max(1, min(size, LARGEST_ODD) - 1) for name, size in sizes.items()}]
        for _ in range(ODD_SIZES):
            found.append({name: _odd(random, size) for name, size in sizes.items()})
    return [case for place, case in enumerate(found) if case not in found[:place]]


def _odd(random: np.random.Generator, size: int) -> int:
    return int(random.integers(0, max(1, (min(size, LARGEST_ODD) + 1) // 2))) * 2 + 1


@contextmanager
def _uninitialized_as_nan() -> Iterator[None]:
    """Let PyTorch fill new tensors that nobody initialises with NaN, or the largest integer."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


class AttemptAnswer(TypedDict):
    """One execution."""

    sizes: str
    draw: str
    correct: bool
    reason: str | None
    share_of_allowed: float | None
    difference: float | None


class ConfigAnswer(TypedDict):
    """One configuration; times are in µs."""

    config: str
    outcome: str
    attempts: list[AttemptAnswer]
    refused: dict[str, str]
    inexact: list[str]
    unbuilt: dict[str, str]
    time_us: float | None
    range_us: list[float] | None
    bound: str | None
    unpredictable: str | None


class TritonAnswer(TypedDict):
    """The answer of `evoengine verify --triton --json`."""

    schema: int
    kernel: str
    gpu: str
    seed: int
    correct: bool
    model_version: int
    configs: list[ConfigAnswer]


def as_answer(target: str, gpu: str, seed: int, verdicts: list[ConfigVerdict]) -> TritonAnswer:
    """Return what --json prints."""
    return {
        "schema": SCHEMA,
        "kernel": target,
        "gpu": gpu,
        "seed": seed,
        "correct": not any(verdict.wrong for verdict in verdicts),
        "model_version": MODEL_VERSION,
        "configs": [_config_answer(verdict) for verdict in verdicts],
    }


def _config_answer(verdict: ConfigVerdict) -> ConfigAnswer:
    found = verdict.prediction if isinstance(verdict.prediction, Prediction) else None
    return {
        "config": verdict.config,
        "outcome": verdict.outcome,
        "attempts": [
            {
                "sizes": one.sizes,
                "draw": one.draw,
                "correct": one.reason is None,
                "reason": one.reason,
                "share_of_allowed": one.share,
                "difference": one.difference,
            }
            for one in verdict.attempts
        ],
        "refused": dict(verdict.refused),
        "inexact": verdict.inexact,
        "unbuilt": verdict.unbuilt,
        "time_us": found.time_us if found else None,
        "range_us": [found.low_us, found.high_us] if found else None,
        "bound": found.bound if found else None,
        "unpredictable": verdict.prediction if isinstance(verdict.prediction, str) else None,
    }
