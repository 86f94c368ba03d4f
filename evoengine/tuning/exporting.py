"""Export the best kernel of a ledger, or one of its trials, after both judges have passed it."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from evoengine.errors import NothingFound, UsageError, hint
from evoengine.formats.flashinfer_solution import trace_files
from evoengine.ledger.check import require_proven
from evoengine.ledger.store import Ledger, open_ledger
from evoengine.ledger.transfer import is_elsewhere
from evoengine.publish.export import export_files, run_time_sizes, triton_files
from evoengine.publish.folder import (
    CHECKSUMS,
    MARK,
    TABLE,
    require_new,
    require_writable,
    with_checksums,
    write_folder,
    write_new,
)
from evoengine.publish.packages import package_files, require_form, require_table_form, table_package_files
from evoengine.publish.record import FILE as RECORD_FILE
from evoengine.publish.record import SIGNED_FILE, record_json, require_key, signed
from evoengine.records import EMULATOR, EXECUTOR, Candidate, Judged, Outcome, Rejection
from evoengine.search.compilers import with_machine_code
from evoengine.search.finishing import is_judged, judge_export
from evoengine.search.reference import autotune_entry
from evoengine.search.targets import spaces_of, target_of
from evoengine.terms import range_us
from evoengine.tuning.best import find_best
from evoengine.tuning.dispatch_table import Table, entry, find_table, table_file
from evoengine.tuning.setup import Echo, checked, drawn_seed, silent
from evoengine.workloads.base import Target
from evoengine.workloads.triton_kernel import AutotuneEntry, is_triton

MAX_SMS = 512
"""largest number of SMs of a GPU on which an exported kernel may run"""


def export(
    folder: Path | str,
    problem: str | None = None,
    gpu: str | None = None,
    *,
    kernel: Path | str | None = None,
    db: str | os.PathLike[str] | None = None,
    pareto: bool = False,
    sign: Path | str | None = None,
    echo: Echo = silent,
    on_stage: Echo = silent,
) -> list[Path]:
    """Write the best kernel with its loader into `folder`, after both judges passed it; return the files.

    `kernel` is that of `best`. `sign` is a private key in PEM, with which the verification record is signed. `on_stage`
    receives the current stage. Raises NothingFound if there is no kernel or a judge refutes it, UsageError if the key
    cannot be read.
    """
    given = {"folder": folder, "problem": problem, "gpu": gpu, "kernel": kernel, "db": db, "sign": sign}
    db = checked(export, given)["db"]
    require_writable(Path(folder))
    if sign is not None:
        require_key(Path(sign))
    with open_ledger(db, create=False) as ledger:
        first = find_best(ledger, problem, gpu, None if pareto else 1, pareto, kernel).candidates[0]
        return _export(ledger, first.trial, Path(folder), echo, on_stage, sign)


def export_table(
    folder: Path | str,
    problems: Sequence[str],
    gpu: str | None = None,
    *,
    kernels: int | None = None,
    form: str | None = None,
    name: str | None = None,
    db: str | os.PathLike[str] | None = None,
    echo: Echo = silent,
    on_stage: Echo = silent,
) -> tuple[Table, list[Path]]:
    """Write the kernels of a dispatch table into a new `folder`: an export for each problem, and table.json.

    Return the table, and the files with table.json first.

    table.json pins each export by the SHA-256 of its checksums, and states the regrets that `find_table` computed. With
    `form` all of it is packed as a "wheel" or "hf-kernel" of that `name`. Raises as `find_table` and `export`, and
    UsageError for an unknown form or an invalid name.
    """
    require_new(Path(folder))
    if form is not None:
        require_table_form(form, name)
    with open_ledger(db, create=False) as ledger:
        on, _ = ledger.targets.last(gpu, problems[0])
        table = find_table(ledger, problems, on, kernels)
        files: dict[str, bytes] = {}
        entries = []
        for served in table.served:
            own = with_checksums(_exported(ledger, served.candidate.trial, echo, on_stage))
            module = json.loads(own[MARK])["module"]
            files |= {f"{module}/{file}": data for file, data in own.items()}
            entries.append(entry(served, module, own[CHECKSUMS]))
    written = {TABLE: _json(table_file(table, entries)), **files}
    return table, write_new(Path(folder), table_package_files(form, written, name) if form else written)


def package(
    folder: Path | str,
    form: str,
    problem: str | None = None,
    gpu: str | None = None,
    *,
    name: str | None = None,
    kernel: Path | str | None = None,
    db: str | os.PathLike[str] | None = None,
    echo: Echo = silent,
    on_stage: Echo = silent,
) -> list[Path]:
    """Write the best kernel as a package into a new `folder`, after both judges passed it; return the files.

    `form` is "wheel" or "hf-kernel", the layout of the Hugging Face Hub's `kernels` library. Raises NothingFound if
    there is no kernel or a judge refutes it, UsageError for an unknown form or an invalid name.
    """
    given = {"folder": folder, "form": form, "problem": problem, "gpu": gpu, "name": name, "kernel": kernel, "db": db}
    db = checked(package, given)["db"]
    require_form(form, name)
    require_new(Path(folder))
    with open_ledger(db, create=False) as ledger:
        first = find_best(ledger, problem, gpu, 1, False, kernel).candidates[0]
        if first.source is not None and is_triton(first.source.text):
            raise UsageError(
                f"trial {first.trial} is of a Triton kernel, which packages do not support: "
                f"{hint('best', export='out/', db=ledger.db)} writes it as code and for Triton's autotuner"
            )
        files = _exported(ledger, first.trial, echo, on_stage)
    return write_new(Path(folder), package_files(form, files, name))


def export_trial(
    folder: Path | str, trial: int, *, db: str | None = None, echo: Echo = silent, on_stage: Echo = silent
) -> list[Path]:
    """Export a trial as `export` does, whatever its rank. Raises NothingFound with its outcome if it is not correct."""
    require_writable(Path(folder))
    with open_ledger(db, create=False) as ledger:
        found = ledger.candidate(trial)
        if found.outcome is None or not (found.outcome.correct or found.outcome is Outcome.UNFINISHED):
            raise _not_correct(found)
        return _export(ledger, trial, Path(folder), echo, on_stage)


def _not_correct(found: Candidate) -> NothingFound:
    ended = ": ".join(filter(None, [str(found.outcome or "pending"), found.reason]))
    return NothingFound(f"trial {found.trial} is not exported: it is not known to be correct, its outcome is {ended}")


def _export(
    ledger: Ledger, trial: int, folder: Path, echo: Echo, on_stage: Echo, sign: Path | str | None = None
) -> list[Path]:
    files = _exported(ledger, trial, echo, on_stage)
    on_stage("writing the files")
    if sign is not None:
        files[SIGNED_FILE] = _json(signed(json.loads(files[RECORD_FILE]), Path(sign)))
    return write_folder(folder, files)


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()


def _exported(ledger: Ledger, trial: int, echo: Echo, on_stage: Echo) -> dict[str, bytes]:
    """Return the files of an export, without their checksums, once both judges passed the trial."""
    on_stage("reading the ledger")
    require_proven(ledger, trial)
    winner = with_machine_code(ledger, trial)
    if isinstance(winner, Rejection):
        why = f"it was imported, and its source does not compile here: {winner.reason}"
        raise NothingFound(f"trial {trial} is not exported: {why}")
    if ledger.is_pruned(trial):
        again = hint("search", problem=winner.problem, gpu=winner.gpu, db=ledger.db)
        raise UsageError(f"trial {trial} has no source: db prune deleted it; {again} finds it again")
    if winner.source is None or winner.binary is None:
        raise UsageError(f"trial {trial} was recorded by another tuner, without its kernel")
    target = target_of(ledger, winner)
    on_stage("finishing the gate")
    seed = drawn_seed()
    judged = _judge(ledger, winner, seed)
    winner = _judged(winner, judged, echo)
    record = record_json(ledger.run(winner.run), winner, judged, seed)
    if target.workload.host is not None:
        on_stage("writing the cache of Triton's autotuner")
        return {**triton_files(winner, target, _autotune_entry(winner, echo)), RECORD_FILE: _json(record)}
    beside = {**trace_files(winner, target, echo), RECORD_FILE: _json(record)}
    return export_files(winner, target, **_launches(ledger, winner, target), beside=beside)


def bundle(ledger: Ledger, trial: int) -> dict[str, bytes]:
    """Return the files that `export_trial` would write from the ledger, without executing or compiling anything.

    Raises NothingFound if the trial is not known to be correct, if its machine code was refuted, or if it was imported
    and not verified here.
    """
    require_proven(ledger, trial)
    winner = ledger.candidate(trial, with_cubin=True)
    if winner.outcome is None or not winner.outcome.correct or winner.refuted:
        raise _not_correct(winner)
    if winner.source is None or winner.binary is None:
        raise NothingFound(f"trial {trial} was recorded by another tuner, without its kernel")
    if winner.imported_from is not None or is_elsewhere(winner.binary):
        raise NothingFound(
            f"trial {trial} was imported from {winner.imported_from} and not verified here: "
            f"{hint('best', trial=trial, export='out/', db=ledger.db)} executes it first"
        )
    if not is_judged(ledger.verdicts(trial)):
        finish = hint("best", trial=trial, export="out/", db=ledger.db)
        raise NothingFound(f"trial {trial} is not exported: its gate is not finished; {finish} finishes it")
    target = target_of(ledger, winner)
    if target.workload.host is not None:
        return with_checksums(triton_files(winner, target, None))
    beside = trace_files(winner, target, silent)
    return with_checksums(export_files(winner, target, **_launches(ledger, winner, target), beside=beside))


def _judge(ledger: Ledger, winner: Candidate, seed: int) -> Judged:
    try:
        return judge_export(ledger, winner, seed)
    except UsageError as error:
        raise UsageError(f"trial {winner.trial} is not exported: {error}") from error


def _judged(winner: Candidate, found: Judged, echo: Echo) -> Candidate:
    """Return the candidate with the verdicts of the export; those of an imported file do not count."""
    if not found.correct:
        raise NothingFound(f"trial {winner.trial} is not exported: {found}")
    echo(f"trial {winner.trial}: {found}")
    by = {v.device: v for v in found.verdicts}
    on_gpu = winner.verdict if winner.imported_from is None and winner.outcome is Outcome.MEASURED else None
    return replace(winner, verdict=on_gpu or by.get(EMULATOR), binary_verdict=by.get(EXECUTOR))


def _autotune_entry(winner: Candidate, echo: Echo) -> AutotuneEntry | None:
    """Return the entry for the cache of Triton's autotuner with predicted times, or None if there can be none."""
    assert winner.source is not None and winner.measurement is not None  # it is ranked
    us = winner.measurement.median_us
    times = [us, *(range_us(winner.measurement.terms) or (us, us))]
    try:
        return autotune_entry(winner.source.text, [time / 1e3 for time in times])
    except UsageError as error:
        echo(f"no entry for the cache of Triton's autotuner: {error}")
        return None


def _launches(ledger: Ledger, winner: Candidate, target: Target) -> dict[str, Any]:
    """Return `grids` and `run_time` of an export, by the rules of the run's space.

    Loaders of built-in workloads have their own rules.
    """
    if target.workload.loader():
        return {}
    try:
        space = spaces_of(ledger, [winner], target)[winner.run]
    except UsageError:  # the current rules reject the space; the judge has reported that
        return {}
    return {
        "grids": space.grids_by_sms(winner.config, range(1, MAX_SMS + 1)),
        "run_time": run_time_sizes(winner, target, space),
    }
