"""Pair measured with predicted times of recorded kernels or of a ledger's candidates, and predict a ledger's again."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from evoengine.accuracy.compilers import find_nvrtc, parse_option
from evoengine.accuracy.dataset import Recording, find_kernels, find_recordings, read_recording
from evoengine.accuracy.page import Row
from evoengine.accuracy.predictions import Answer, Key, answer_all, kernel_of, key_of
from evoengine.errors import EvoengineError, UsageError
from evoengine.ledger.store import Ledger
from evoengine.records import L2, Candidate, Clocks, Kind, Rejection
from evoengine.sass.chip import BOOST, SUSTAINED, Clock, find_chip
from evoengine.sass.predict import MODEL_VERSION, Unpredictable
from evoengine.search.compilers import with_machine_code
from evoengine.search.targets import target_of
from evoengine.stages.predict import figure_of, predict_binary
from evoengine.terms import model_version

Recordings = Sequence[tuple[Path, Recording]]


def recorded_rows(
    folder: Path, nvrtc: Sequence[str], samples: int | None, jobs: int
) -> tuple[list[Row], list[str], list[str]]:
    """Return the rows, remarks on the data, and a sentence on each kernel, GPU or configuration that is missing.

    Raises UsageError if the folder holds no recorded kernel or an option is malformed.
    """
    compilers = tuple(parse_option(text) for text in nvrtc)
    for version, _ in compilers:
        find_nvrtc(version, compilers)  # so that a wrong path is reported before hours of work
    recordings, missed = read_all(folder, samples)
    answers = answer_all(recordings, compilers, jobs)
    rows: list[Row] = []
    for of_kernel, recording in recordings:
        found, failures = _rows_of(of_kernel, recording, answers)
        rows += found
        missed += [f"{of_kernel.name} on {recording.name}: {n} {why}" for why, n in grouped(failures).most_common()]
    return rows, list(_remarks(recordings)), missed


def read_all(folder: Path, samples: int | None) -> tuple[list[tuple[Path, Recording]], list[str]]:
    """Return every readable recording with its kernel's folder, and a sentence on each that is not."""
    found, unreadable = [], []
    for kernel_folder in find_kernels(folder):
        try:
            kernel, paths = kernel_of(kernel_folder), find_recordings(kernel_folder)
        except UsageError as error:
            unreadable.append(str(error))
            continue
        for path in paths:
            try:
                recording = read_recording(path, kernel)
                find_chip(recording.gpu)
            except UsageError as error:
                unreadable.append(str(error))
                continue
            found.append((kernel_folder, _sampled(recording, samples)))
    return found, unreadable


def _sampled(recording: Recording, samples: int | None) -> Recording:
    if samples is None or samples >= len(recording.rows):
        return recording
    # the first of a fixed order, so that a smaller sample is a subset of a larger one
    chosen = np.sort(np.random.default_rng(0).permutation(len(recording.rows))[:samples])
    return replace(recording, rows=tuple(recording.rows[i] for i in chosen))


def _rows_of(folder: Path, recording: Recording, answers: dict[Key, Answer]) -> tuple[list[Row], Counter[str]]:
    gpu, rows, failures = recording.gpu, [], Counter[str]()
    for row in recording.rows:
        answer = answers[key_of(folder, row.config, gpu)]
        us = answer.predicted.get(gpu, {}).get("model", math.inf)
        if answer.failure or not math.isfinite(us):
            failures[answer.failure or f"not predicted: {answer.problems[gpu]}"] += 1
            continue
        config = " ".join(f"{name}={value}" for name, value in row.config.items())
        named = folder.name, folder.name, config, gpu, str(recording.clock)
        rows.append(Row(*named, row.time_us, us, *answer.said[gpu]))
    return rows, failures


def _remarks(recordings: Recordings) -> Iterator[str]:
    for folder, recording in recordings:
        if recording.stated_clock is None:
            yield f"{folder.name} on {recording.name}: no clock is stated, so it is assumed not to be locked"
        for reason in recording.unreadable:
            yield f"{folder.name} on {recording.name}: left out, {reason}"


def grouped(problems: Counter[str]) -> Counter[str]:
    """Return the counts with problems that differ only in numbers added up under the first of them."""
    first: dict[str, str] = {}
    found: Counter[str] = Counter()
    for problem, count in problems.items():
        found[first.setdefault(re.sub(r"0x[0-9a-f]+|\d+", "#", problem), problem)] += count
    return found


SET = "own measurements"
OnTrial = Callable[[int], None]


class NotPredicted(Exception):
    """A candidate that the model could not predict; the message names it and the reason."""


def measured_rows(ledger: Ledger, on_trial: OnTrial) -> Iterator[Row | NotPredicted]:
    """Yield each measured candidate beside its prediction at the clock and with the L2 that it was measured with."""
    for trial in _ranked(ledger, lambda c: c.ranked_by.kind is Kind.MEASURED):
        on_trial(trial)
        try:
            candidate = _with_code(ledger, trial)
            policy = candidate.ranked_by.policy
            sustained = policy is not None and policy.clocks is Clocks.SUSTAINED
            clock = Clock(SUSTAINED if sustained else BOOST)
            target = replace(target_of(ledger, candidate), clock=clock)
            cold = policy is None or policy.l2 is not L2.WARM
            p = predict_binary(target, candidate.contender, cold)
            us, named = candidate.ranked_by.median_us, (f"trial {trial}", candidate.problem, candidate.gpu)
            yield Row(SET, *named, str(clock), us, p.time_us, p.kernel_class, p.bound)
        except (Unpredictable, EvoengineError) as error:
            yield NotPredicted(f"trial {trial}: {error}")


def predict_again(ledger: Ledger, on_trial: OnTrial) -> Iterator[int | NotPredicted]:
    """Predict again each candidate whose figure is an older model's, and record the figure beside the old one."""
    for trial in _ranked(ledger, _by_older_model):
        on_trial(trial)
        try:
            candidate = _with_code(ledger, trial)
            target = target_of(ledger, candidate)
            figure = figure_of(predict_binary(target, candidate.contender), target.gpu, target.flops)
            ledger.record_measurement(trial, figure)
            yield trial
        except (Unpredictable, EvoengineError) as error:
            yield NotPredicted(f"trial {trial}: {error}")


def _by_older_model(candidate: Candidate) -> bool:
    version = model_version(candidate.ranked_by.terms)
    return version is not None and version < MODEL_VERSION


def _ranked(ledger: Ledger, wanted: Callable[[Candidate], bool]) -> list[int]:
    return [t.trial for t in ledger.trials(ranked=True) if t.measurement and wanted(ledger.candidate(t.trial))]


def _with_code(ledger: Ledger, trial: int) -> Candidate:
    """Raise Unpredictable if the candidate's machine code is gone and its source does not compile here."""
    found = with_machine_code(ledger, trial)
    if isinstance(found, Rejection):
        raise Unpredictable(f"its machine code is not stored, and its source does not compile here: {found.reason}")
    if found.binary is None:
        raise Unpredictable("it has no machine code")
    return found
