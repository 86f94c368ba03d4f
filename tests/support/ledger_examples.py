"""Records for the tests of the ledger, and a run that holds them."""

from __future__ import annotations

from types import SimpleNamespace

from alembic.autogenerate import compare_metadata
from sqlalchemy import MetaData

from evoengine.ledger.schema import alembic_context
from evoengine.ledger.store import Ledger
from evoengine.records import (
    L2,
    Binary,
    CaseResult,
    Clocks,
    Config,
    Device,
    Kind,
    Launch,
    LaunchMode,
    Measurement,
    Outcome,
    Policy,
    Source,
    Verdict,
)

PROBLEM = "attention:b1,h2,s64,d32,fp16"
GPU = "h100"
DOMAINS = {"family": ("scalar", "wmma"), "tile_m": (32, 64, 128), "unroll": (False, True), "share": (0.0, 0.25)}
CONFIG: Config = {"family": "wmma", "tile_m": 64, "unroll": True, "share": 0.25}
SPACE = SimpleNamespace(name="attention.toml", sha256="5" * 64, text='kernel = "attention"\n')


def a_source(text: str = "kernel") -> Source:
    return Source(f'extern "C" __global__ void {text}() {{}}  // µ\n', text, Launch((2, 3, 4), 128, 4096))


def a_binary(**changes: object) -> Binary:
    values: dict[str, object] = {
        "cubin": b"\x7fELF\x00\xff",
        "arch": "sm_90a",
        "options": "-arch=sm_90a --std=c++17",
        "compiler": "NVRTC 13.0",
        "registers": 57,
        "spill_bytes": 12,
        "stack_bytes": 8,
        "shared_bytes": 1024,
        "warnings": ("C7510: wgmma is serialised",),
        "mix": {"HMMA": 64, "LDSM": 32},
        "compile_ms": 310.25,
    }
    return Binary(**(values | changes))  # type: ignore[arg-type]


def a_verdict(outcome: Outcome | None = None, max_error: float | None = 2.4e-4) -> Verdict:
    cases = (
        CaseResult("ragged", PROBLEM, 2**63 - 1, outcome is None, max_error, 1.5e-5, 1e-3),
        CaseResult("one-hot rows", PROBLEM, 7, True, None, None, None, "no result to compare"),
    )
    return Verdict("emulator", outcome, "off by 1" if outcome else None, cases, 140.5)


POLICY = Policy(LaunchMode.GRAPH, L2.COLD, Clocks.BOOST, 16)
SUSTAINED = Policy(LaunchMode.GRAPH, L2.WARM, Clocks.SUSTAINED)


PREDICTED = {
    "predicted": 1.0, "low_us": 20000.0, "high_us": 30000.0, "roofline_us": 100.0, "bound_tensor": 1.0,
    "blocks_per_sm": 2.0, "waves": 15.5, "model_version": 2.0, "clock_sustained": 1.0, "clock_ghz": 1.6, "clocks": 4e7,
    "class_wgmma with softmax": 1.0, "tensor_share": 0.72, "mufu_share": 0.4,
}  # fmt: skip
"""terms of a prediction"""


def a_figure(tflops: float, kind: Kind = Kind.ESTIMATED, suspect: str | None = None) -> Measurement:
    samples = (25300.0, 25299.5) if kind is Kind.MEASURED else ()
    median_us = 25300.0 * 42.5 / (tflops or 1.0)
    policy = POLICY if kind is Kind.MEASURED else None
    terms = {"memory_us": 12.5} | (PREDICTED if kind is Kind.ESTIMATED else {})
    return Measurement(kind, "NVIDIA H200", tflops, median_us, samples, 0.03, terms, suspect, policy)


def start_run(ledger: Ledger, **changes: object) -> int:
    values = {"gpu": GPU, "problem": PROBLEM, "device": Device("emulator"), "space": SPACE, "sampler": "tpe", "seed": 1}
    return ledger.start_run(**(values | {"command": "evoengine search"} | changes))


def add_ranked(
    ledger: Ledger, run: int, figure: Measurement, config: Config = CONFIG, name: str = "kernel",
    parents: tuple[int, ...] = (), problem: str = PROBLEM, gpu: str = GPU, binary: Binary | None = None,
) -> int:  # fmt: skip
    """A candidate that went down the whole road."""
    trial = ledger.add_candidate(run, problem, gpu, config, parents, "sampler", a_source(name))
    ledger.record_binary(trial, a_source(name), binary or a_binary())
    ledger.record_verdict(trial, a_verdict())
    ledger.record_measurement(trial, figure)
    outcome = Outcome.SUSPECT if figure.suspect else Outcome(str(figure.kind))
    ledger.finish(trial, outcome, figure.suspect, 0.25, "emulator")
    return trial


def add_step(ledger: Ledger, run: int, before: float, after: float) -> tuple[int, int]:
    """A ranked candidate, and one that was made from it by a larger tile; with their TFLOPS."""
    parent = add_ranked(ledger, run, a_figure(before))
    child = add_ranked(ledger, run, a_figure(after), CONFIG | {"tile_m": 128}, "child", (parent,))
    return parent, child


def differences(ledger, models: MetaData) -> list:
    """What Alembic would change of the ledger's tables to make them those of the models."""
    with ledger.database.engine.begin() as connection:
        return compare_metadata(alembic_context(connection), models)
