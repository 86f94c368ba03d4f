"""Write README.md of an exported folder: what the kernel is, its origin, its checks and its use.

Text from a ledger, a file or a driver is put in code spans, where neither Markdown nor HTML is interpreted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from evoengine import __version__
from evoengine.devices.base import ConstantParameter, Parameter, ScratchParameter, TensorParameter
from evoengine.records import Binary, Candidate, Measurement, Source, Verdict
from evoengine.terms import digits, range_us
from evoengine.text import rounded
from evoengine.workloads.base import Target

LONGEST = 400
"""characters of one value"""
_KINDS = {
    "measured": "measured on the GPU that is named",
    "recorded": "recorded by another tuner, not by evoengine",
    "estimated": "as nothing ran on a GPU",
}


def code(value: object) -> str:
    """Return a value as a code span on one line, with characters that do not print escaped."""
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(value))
    text = text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
    ticks = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    room = " " if not text or text[0] in " `" or text[-1] in " `" else ""
    return f"{ticks}{room}{text}{room}{ticks}"


def readme(module: str, candidate: Candidate, target: Target, source: Source, binary: Binary) -> str:
    """Return the page as Markdown. `module` is the loader's name without `.py`."""
    sections = (
        _title(module, target, candidate),
        _usage(module, target, candidate),
        _provenance(candidate, target, source, binary),
        figure_section(candidate.measurement),
        gate_section(candidate.verdict, "The gate, on"),
        gate_section(candidate.binary_verdict, "The machine code, executed on the CPU:"),
        _licence(target),
    )
    return "\n\n".join("\n".join(section) for section in map(list, sections) if section) + "\n"


def _title(module: str, target: Target, candidate: Candidate) -> Iterator[str]:
    yield f"# {module}"
    yield ""
    yield f"A CUDA kernel for {code(target.problem)}, found by evoengine {__version__} for the {code(target.gpu.name)}."
    yield "Inference only: it has no backward pass. `sha256sum -c SHA256SUMS` checks the files."


def _usage(module: str, target: Target, candidate: Candidate) -> Iterator[str]:
    name = target.workload.name.replace("-", "_")
    inputs, outputs = _tensors(target, candidate)
    yield "## Use"
    yield ""
    yield "It needs torch or CuPy and an NVIDIA driver, nothing of evoengine. With this folder on Python's path:"
    yield ""
    yield "```python"
    yield f"from {module} import {name}"
    yield ""
    yield f"help({name})"
    yield f"{', '.join(outputs) or 'out'} = {name}({', '.join(inputs)})"
    yield "```"
    yield ""
    yield "Under torch call it within `torch.no_grad()`. Ship the folder whole and keep the loader's name, which no"
    yield "other export has: so each import gets its own kernel. The folder's own name may be any."


def _tensors(target: Target, candidate: Candidate) -> tuple[list[str], list[str]]:
    parameters: tuple[Parameter, ...] = tuple(target.workload.parameters(target.problem, candidate.config))
    tensors = [p for p in parameters if isinstance(p, TensorParameter)]
    constants = [p.contents for p in parameters if isinstance(p, ConstantParameter)]
    inputs = [p.name for p in tensors if not p.output or p.inout]
    return list(dict.fromkeys([*inputs, *constants])), [p.name for p in tensors if p.output]


def _provenance(candidate: Candidate, target: Target, source: Source, binary: Binary) -> Iterator[str]:
    launch = source.launch
    yield "## Where it comes from"
    yield ""
    yield f"- trial {candidate.trial} of run {candidate.run}, exported by evoengine {__version__}"
    if candidate.imported_from is not None:
        yield f"- the run was imported from {code(candidate.imported_from)}; binary and verdict were made here"
    yield f"- problem: {code(target.problem)}"
    yield f"- GPU: {code(target.gpu.key)}, {code(target.gpu.name)}, {code(binary.arch)}, {target.gpu.sms} SMs"
    yield f"- configuration: {code(json.dumps(dict(candidate.config)))}"
    for entry, own in launch.kernels(source.entry):
        of = f"launch of {code(entry)}" if launch.then else "launch"
        yield f"- {of}: grid {own.grid}, block {own.block}, {own.shared_bytes:,} bytes of dynamic shared memory"
    yield f"- resources: {binary.registers} registers, {binary.spill_bytes} bytes spilled"
    for other in binary.others:
        yield f"- resources of {code(other.entry)}: {other.registers} registers, {other.spill_bytes} bytes spilled"
    for parameter in target.workload.parameters(target.problem, candidate.config):
        if isinstance(parameter, ScratchParameter):
            zeroed = (
                ", which the loader zeroes before each call; the time below does not include that" * parameter.zeroed
            )
            yield f"- scratch memory: {code(parameter.name)}, {parameter.bytes:,} bytes{zeroed}"
    yield f"- compiler: {code(binary.compiler)}, options {code(binary.options)}"
    yield f"- source: SHA-256 {code(source.sha256)}"


def figure_section(figure: Measurement | None) -> Iterator[str]:
    """Yield the lines of the section about the time."""
    yield "## Time"
    yield ""
    if figure is None:
        yield "None was taken."
        return
    ends = range_us(figure.terms)
    shown = digits(figure.compared_us, ends)
    speed = f", {rounded(figure.tflops, shown)} TFLOPS" if figure.tflops is not None else ""
    yield f"{rounded(figure.compared_us, shown)} µs{speed}: **{figure.kind}**, {_KINDS[str(figure.kind)]}."
    yield ""
    yield f"- by: {code(figure.device)}"
    if figure.policy:
        yield f"- how: {code(figure.policy)}, {len(figure.samples_us)} samples"
    if figure.vs_baseline is not None:
        yield f"- {figure.vs_baseline:.3g} times as fast as the fastest baseline of its run"
    if ends:
        yield f"- the model's range: {rounded(ends[0], shown)} to {rounded(ends[1], shown)} µs"
    if figure.suspect:
        yield f"- suspect: {code(figure.suspect)}"


def gate_section(verdict: Verdict | None, title: str) -> Iterator[str]:
    """Yield the lines of the section about a verdict; none without one."""
    if verdict is None:
        return
    found = "not judged" if verdict.abstained else "correct" if verdict.correct else "not correct"
    yield f"## {title} {code(verdict.device)}: {found}"
    yield ""
    if verdict.abstained:
        yield f"- {code(verdict.reason)}"
    for case in verdict.cases:
        error = "no result" if case.max_error is None else f"largest error {case.max_error:.3g}"
        allowed = "" if case.allowed is None else f", allowed {case.allowed:.3g}"
        passed = "passed" if case.correct else "failed"
        of = f", {code(case.part)}" if case.part else ""
        yield f"- {code(case.name)} on {code(case.problem)}{of}, seed {case.seed}: {passed}, {error}{allowed}"
    if not verdict.correct:
        yield f"- {code(verdict.outcome)}: {code(verdict.reason)}"


def _licence(target: Target) -> Iterator[str]:
    own = target.workload.definition_text is not None
    kernel = (
        "`kernel.cu` and `kernel.cubin` are made from a kernel that somebody brought: its author's licence holds."
        if own
        else "`kernel.cu` and `kernel.cubin` are made from evoengine's templates, under the same licence."
    )
    yield "## Licence"
    yield ""
    yield f"The loader and `_cuda.py` are evoengine's, under the Apache License 2.0. {kernel}"
