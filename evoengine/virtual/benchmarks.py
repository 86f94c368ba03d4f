"""Triton's benchmarks on the virtual GPU: what is given is called once to be executed, and once to be predicted."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import triton.testing

from evoengine.virtual.device import VirtualGpu


@contextmanager
def predicted_benchmarks(device: VirtualGpu) -> Iterator[None]:
    """Put benchmarks by prediction in place of `do_bench` and `do_bench_cudagraph` in triton.testing."""

    def do_bench(
        fn: Callable[[], object],
        warmup: int = 25,
        rep: int = 100,
        grad_to_none: Sequence[torch.Tensor] | None = None,
        quantiles: Sequence[float] | None = None,
        return_mode: str = "mean",
    ) -> Any:
        """Return the predicted milliseconds of a call; infinite where it launches nothing, or what has no time."""
        assert return_mode in ("min", "max", "mean", "median", "all")
        before = device.now
        fn()
        for tensor in grad_to_none or ():
            tensor.grad = None
        ms = math.inf if device.now.launches == before.launches else predicted_ms(device, fn)
        return triton.testing._summarize_statistics([ms], quantiles, return_mode)  # noqa: SLF001 # as Triton's own do

    def do_bench_cudagraph(
        fn: Callable[[], object],
        rep: int = 20,
        grad_to_none: Sequence[torch.Tensor] | None = None,
        quantiles: Sequence[float] | None = None,
        return_mode: str = "mean",
    ) -> Any:
        return do_bench(fn, 0, rep, grad_to_none, quantiles, return_mode)

    with mock.patch.multiple(triton.testing, do_bench=do_bench, do_bench_cudagraph=do_bench_cudagraph):
        yield


def predicted_ms(device: VirtualGpu, call: Callable[[], object]) -> float:
    """Call with launches only predicted, and return their milliseconds."""
    before, device.only_predicts = device.only_predicts, True
    try:
        start = device.now
        call()
        return device.ms_between(start, device.now)
    finally:
        device.only_predicts = before
