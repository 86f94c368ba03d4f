"""Read recorded search spaces: files in which every valid configuration of a kernel was measured beforehand.

Two formats, plain or gzipped, whole or cut short: Kernel Tuner's cache and the FAIR benchmark suite's T4 results. A T4
file names no domains; they come from the values that occur.
"""

from __future__ import annotations

import codecs
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from evoengine.errors import UsageError
from evoengine.ledger.store import Ledger
from evoengine.objectives import OBJECTIVES, objective_values
from evoengine.publish.imported import LONGEST_NAME as LONGEST_VALUE
from evoengine.publish.imported import is_knob_value
from evoengine.records import Candidate, Config, Kind, Measurement, Outcome, Value
from evoengine.sandbox.untrusted import parse_json, read_limited, unpack_limited
from evoengine.search.neighbours import CONTRADICTION, recorded_figures
from evoengine.search.progress import OnChange, Progress
from evoengine.search.proposer import Proposer, run_past
from evoengine.space.definition import Knob, domain_error
from evoengine.text import printable

LARGEST_FILE = 1 << 30
"""bytes of a recorded space or a T4 file, packed or not"""
GZIP = b"\x1f\x8b"
LONGEST_WORD = 32
"""characters of a number, or of true, false and null, within which a log may be truncated"""
NESTED = 100
"""objects within one entry of a log, at most"""


def load(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, plain or gzipped; a truncated one is closed after its last complete entry.

    Raises UsageError if there is none.
    """
    try:
        raw = read_limited(path, LARGEST_FILE)
        plain = unpack_limited(raw, LARGEST_FILE) if raw.startswith(GZIP) else raw
        content = _parsed(codecs.getincrementaldecoder("utf-8-sig")().decode(plain))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}; give a recorded space") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not a recorded space: it must be a JSON object, plain or gzipped") from error
    except ValueError as error:
        raise UsageError(
            f"{path} is not a recorded space: {error}; it must be a JSON object, plain or gzipped"
        ) from error
    if not isinstance(content, dict):
        raise UsageError(
            f"{path} is not a recorded space: it must be a JSON object, or a log of one that was cut short"
        )
    return content


def _parsed(text: str) -> Any:
    """Parse JSON, or a truncated log, which is closed after its last complete entry.

    Return None if the text is neither. Raises ValueError for JSON with invalid content.
    """
    text = text.rstrip().rstrip(",")
    try:
        return parse_json(text)
    except json.JSONDecodeError as error:
        if not error.msg.startswith("Unterminated string") and len(text) - error.pos > LONGEST_WORD:
            return None  # wrong before its end
    end = len(text)
    for _ in range(NESTED):
        for closing in ("}", "}}", "]}"):
            try:
                return parse_json(text[:end] + closing)
            except json.JSONDecodeError:
                continue
        # Before the last comma after an object. It may be one within an entry: then none of the closings fits.
        end = text.rfind("},", 0, end) + 1
        if not end:
            break
    return None


MILLISECONDS = {
    "nanoseconds": 1e-6, "ns": 1e-6, "microseconds": 1e-3, "us": 1e-3, "µs": 1e-3, "milliseconds": 1.0,
    "miliseconds": 1.0, "ms": 1.0, "seconds": 1e3, "s": 1e3,
}  # fmt: skip # a table
"""factor to ms, by the `timeunit` of a T4 file or the unit of a figure; the hub's own files spell it with one l"""
FAILURES = ("CompilationFailedConfig", "RuntimeFailedConfig", "InvalidConfig", "ErrorConfig")
"""what Kernel Tuner writes in place of the objective of a failed configuration, in newer versions as `__error__`"""
ESTIMATE = f"{Kind.ESTIMATED} time"
"""name of an estimated figure in evoengine's own T4 files"""
FAILED = 1e20
"""the time that Kernel Tuner's early versions gave a configuration that failed"""
MAX_VALUES = 2**15
"""of a knob: rows are int16"""
MAX_KNOBS = 256
LONGEST_NAME = 200
"""characters of a knob's name, and of a value that is a text"""
LIMITS = f"below 2^63 or of at most {LONGEST_VALUE:,} characters"
A_VALUE = f"it must be a finite number or a text, {LIMITS}"


@dataclass(frozen=True)
class RecordedSpace:
    """The recorded configurations, which are the valid ones. Offers samplers what `SearchSpace` does.

    rows: int16 [n, knobs], no two alike, positions in the knobs' domains; -1 where a configuration has no such knob.
    times: float64 [n], the objective in milliseconds, NaN where the configuration failed.
    samples: float64, milliseconds, of one configuration after the other; `ends` int64 [n] says where each one's end.
    reasons: why it failed, by row number.
    estimated: results left out because their time is an estimate; such are never mixed with recorded ones.
    contradicting: configurations of which the file has figures that contradict each other.
    """

    path: Path
    device: str | None
    knobs: tuple[Knob, ...]
    rows: np.ndarray
    times: np.ndarray
    samples: np.ndarray
    ends: np.ndarray
    reasons: Mapping[int, str]
    estimated: int
    contradicting: int = 0

    def first_points(self, rng: np.random.Generator) -> list[tuple[Config, str]]:
        """Return no start points: a replay shows what a sampler finds by itself."""
        return []

    @property
    def name(self) -> str:
        return printable(self.path.name.removesuffix(".gz").removesuffix(".json"), LONGEST_NAME)

    @property
    def optimum(self) -> float:
        """Return the least recorded time in ms."""
        return float(np.nanmin(self.times))

    def time(self, config: Config) -> float | None:
        """Return the time in ms; None if the configuration failed. Raises UsageError if it was not recorded."""
        time = self.times[self._row_index(config)]
        return None if math.isnan(time) else float(time)

    def samples_of(self, config: Config) -> np.ndarray:
        """Return the samples behind `time`: float64 [m], ms, in the order of the file; empty if it has none."""
        place = self._row_index(config)
        return self.samples[self.ends[place - 1] if place else 0 : self.ends[place]]

    def reason(self, config: Config) -> str | None:
        """Return why a configuration failed; None if it did not."""
        return self.reasons.get(self._row_index(config))

    def __len__(self) -> int:
        return len(self.rows)

    def contains(self, config: Config) -> bool:
        positions = [knob.index(config[knob.name]) if knob.name in config else -1 for knob in self.knobs]
        return config.keys() <= self._conditional.keys() and tuple(positions) in self._row_indices

    def is_active(self, knob: Knob, config: Config) -> bool:
        """Return whether the recorded configurations that agree in all knobs before this one have the knob."""
        if not self._conditional[knob.name]:
            return True
        before = list(self._conditional).index(knob.name)
        alike = (self.rows[:, :before] == self.encode(config)[:before]).all(1)
        return bool((self.rows[alike, before] >= 0).any())

    def sample(self, rng: np.random.Generator, n: int = 1) -> list[dict[str, Value]]:
        """Draw n recorded configurations independently and uniformly."""
        return [self.decode(self.rows[i]) for i in rng.integers(len(self.rows), size=n)]

    def enumerate(self) -> Iterator[dict[str, Value]]:
        """Yield every recorded configuration once, in the order of the file."""
        return map(self.decode, self.rows)

    def neighbours(self, config: Config) -> list[dict[str, Value]]:
        """Return the recorded configurations that differ in one knob, in the order of the file."""
        changed = (self.rows != self.encode(config)).sum(1)
        return [self.decode(row) for row in self.rows[changed == 1]]

    def encode(self, config: Config) -> np.ndarray:
        """Return the positions in the knobs' domains, int16 [knobs], -1 for an absent knob.

        Raises UsageError for an unknown value.
        """
        return np.array([_index(knob, config, self.path) for knob in self.knobs], np.int16)

    def decode(self, row: Sequence[int] | np.ndarray) -> dict[str, Value]:
        """Return the configuration of an encoded row [knobs]; the inverse of `encode`."""
        positions = zip(self.knobs, np.asarray(row).tolist(), strict=True)
        return {knob.name: knob.values[i] for knob, i in positions if i >= 0}

    @cached_property
    def _conditional(self) -> dict[str, bool]:
        """Return, for each knob, whether some configurations lack it."""
        conditional = np.any(self.rows < 0, axis=0)
        return {knob.name: bool(lacking) for knob, lacking in zip(self.knobs, conditional, strict=True)}

    @cached_property
    def _row_indices(self) -> dict[tuple[int, ...], int]:
        return {tuple(row): i for i, row in enumerate(self.rows.tolist())}

    def _row_index(self, config: Config) -> int:
        place = self._row_indices.get(tuple(self.encode(config).tolist()))
        if place is None:
            raise UsageError(f"{self.path}: {dict(config)} was not recorded; ask for a configuration of this space")
        return place


def read_recorded(path: Path) -> RecordedSpace:
    """Read a Kernel Tuner cache or T4 results.

    If a configuration was tried several times, the last result counts. Raises UsageError if the file is neither, or
    holds no configuration or no measured time.
    """
    content = load(path)
    try:
        return _read(content, path)
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        wrong = printable(f"{type(error).__name__}: {error}")
        raise UsageError(
            f"{path}: a part is missing or malformed ({wrong}); give a file as the tuner wrote it"
        ) from error


def _read(content: Mapping[str, Any], path: Path) -> RecordedSpace:
    domains, scale, found = _entries(content, path)
    entries = [e for e in found if e is not None]
    estimated = len(found) - len(entries)
    if estimated and all(math.isnan(e.time) for e in entries):
        raise UsageError(f"{path} has estimated times alone; give a file of times that were measured")
    if not entries:
        raise UsageError(f"{path} records no configuration; it must hold at least one")
    knobs = _knobs(occurring([e.config for e in entries]) if domains is None else domains, path)
    positions = [tuple(_index(knob, e.config, path) for knob in knobs) for e in entries]
    contradicting = _contradicting(positions, [e.time for e in entries])
    last = list({row: i for i, row in enumerate(positions)}.values())
    entries, rows = [entries[i] for i in last], np.array([positions[i] for i in last], np.int16)
    if domains:
        _require_all(knobs, rows, path)
    else:
        _require_conditions(knobs, rows, path)
    times = np.array([e.time for e in entries])
    if np.isnan(times).all():
        raise UsageError(f"{path} has no configuration with a time; at least one must have run")
    reasons = {i: e.reason for i, e in enumerate(entries) if e.reason is not None}
    samples = _samples(entries, path) * scale
    ends = np.array(list(accumulate(len(e.samples) for e in entries)))
    return RecordedSpace(path, _device(content), knobs, rows, times, samples, ends, reasons, estimated, contradicting)


def _contradicting(rows: Sequence[tuple[int, ...]], times: Sequence[float]) -> int:
    """Return how many rows occur with times that contradict each other, or with a time and as a failure (NaN)."""
    of: dict[tuple[int, ...], list[float]] = {}
    for row, time in zip(rows, times, strict=True):
        of.setdefault(row, []).append(time)
    ran = {row: [time for time in found if not math.isnan(time)] for row, found in of.items() if len(found) > 1}
    unlike = [own and (len(own) < len(of[row]) or max(own) > CONTRADICTION * min(own)) for row, own in ran.items()]
    return sum(map(bool, unlike))


@dataclass(frozen=True, slots=True)
class _Entry:
    config: Mapping[str, Value]
    time: float
    reason: str | None
    samples: Sequence[float] = ()
    """in the file's unit"""


def _entries(
    content: Mapping[str, Any], path: Path
) -> tuple[dict[str, list[Value]] | None, float, list[_Entry | None]]:
    """Return the domains of knobs, the samples' unit in ms, and the entries.

    The domains are None if the format does not state them, and so is the entry of an estimate.
    """
    if isinstance(content.get("cache"), dict):
        return _cache_domains(content, path), 1.0, [_cache_entry(e, path) for e in content["cache"].values()]
    if isinstance(content.get("results"), list):
        scale = _milliseconds(content.get("metadata", {}).get("timeunit", "milliseconds"), path)
        return None, scale, [_t4_entry(e, scale, path) for e in content["results"]]
    raise UsageError(f"{path} is not a recorded space: it must be a Kernel Tuner cache file or FAIR T4 results")


def _device(content: Mapping[str, Any]) -> str | None:
    name = content.get("device_name") or content.get("metadata", {}).get("device")
    return printable(str(name), LONGEST_NAME) if name else None


def _cache_domains(content: Mapping[str, Any], path: Path) -> dict[str, list[Value]]:
    keys, domains = content.get("tune_params_keys"), content.get("tune_params")
    if not isinstance(keys, list) or not keys or not isinstance(domains, dict) or not all(k in domains for k in keys):
        raise UsageError(f"{path} is no Kernel Tuner cache: tune_params must give a domain to each of tune_params_keys")
    return {key: domains[key] for key in keys}


def _cache_entry(entry: Any, path: Path) -> _Entry:
    failure = next((v for v in entry.values() if v in FAILURES), None) if isinstance(entry, dict) else None
    if not isinstance(entry, dict) or ("time" not in entry and not failure):
        raise UsageError(f"{path} has a configuration without time; each must carry one, or the failure in its place")
    time, reason = (math.nan, failure) if failure else _time(entry["time"])
    return _Entry(entry, time, reason, () if reason else entry.get("times") or ())


def _t4_entry(entry: Any, scale: float, path: Path) -> _Entry | None:
    """Return an entry of T4 results, or None for an estimate, which evoengine also called `time` once.

    It succeeded if its `invalidity` is "correct"; its `time` counts, or an objective in a unit of time.
    """
    if not isinstance(entry, dict) or not isinstance(entry.get("configuration"), dict):
        raise UsageError(f"{path} has a result without configuration; each T4 result must carry one")
    config = entry["configuration"]
    for name, value in config.items():
        if not is_knob_value(value):
            raise UsageError(f"{path} gives knob {name} the value {printable(repr(value), 60)}; {A_VALUE}")
    invalidity = entry.get("invalidity", "correct")
    if invalidity != "correct":
        return _Entry(config, math.nan, printable(str(invalidity)))
    measured = {m["name"]: m for m in entry.get("measurements", ())}
    own = entry.get("evoengine") or {}
    if ("time" not in measured and ESTIMATE in measured) or own.get("outcome") == Outcome.ESTIMATED:
        return None
    aims = [measured[name] for name in entry.get("objectives", ()) if name in measured]
    found = measured.get("time") or next((m for m in aims if m.get("unit") in MILLISECONDS), None)
    if found is None:
        raise UsageError(f"{path} has a result without time; each correct one must measure one, in a unit of time")
    time, reason = _time(found["value"])
    unit = _milliseconds(found["unit"], path) if found.get("unit") else scale
    return _Entry(config, time * unit, reason, () if reason else (entry.get("times") or {}).get("runtimes") or ())


def _milliseconds(unit: Any, path: Path) -> float:
    if unit not in list(MILLISECONDS):
        raise UsageError(f"{path} has the timeunit {unit!r}; it must be one of {', '.join(MILLISECONDS)}")
    return MILLISECONDS[unit]


def _time(value: Any) -> tuple[float, str | None]:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < FAILED:
        return float(value), None
    return math.nan, printable(str(value))


def _samples(entries: Sequence[_Entry], path: Path) -> np.ndarray:
    """Return all samples in one array: as lists of floats, those of a large file would take hundreds of megabytes."""
    try:
        samples = np.fromiter(chain.from_iterable(e.samples for e in entries), np.float64)
    except (OverflowError, TypeError, ValueError) as error:
        raise UsageError(f"{path} has a sample that is not a time ({error}); each must be a number") from error
    if not ((samples >= 0) & (samples < FAILED)).all():
        raise UsageError(f"{path} has a sample that is not a time; each must be from 0 to {FAILED:g}")
    return samples


def occurring(configs: Sequence[Config]) -> dict[str, list[Value]]:
    """Return the values of each knob that occur, numbers in ascending order.

    A knob follows those that precede it in any configuration, as far as all configurations agree.
    """
    domains: dict[str, dict[Value, None]] = {}
    order: TopologicalSorter[str] = TopologicalSorter()
    for names in dict.fromkeys(map(tuple, configs)):
        for before, after in pairwise(names):
            order.add(after, before)
    for config in configs:
        for name, value in config.items():
            domains.setdefault(name, {})[value] = None
    with suppress(CycleError):
        domains = {name: domains[name] for name in order.static_order()} or domains
    return {
        name: list(values) if any(isinstance(v, str) for v in values) else sorted(values)
        for name, values in domains.items()
    }


def _require_all(knobs: Sequence[Knob], rows: np.ndarray, path: Path) -> None:
    for knob, lacking in zip(knobs, np.any(rows < 0, axis=0), strict=True):
        if lacking:
            raise UsageError(f"{path} has a configuration without {knob.name}; each must give every knob a value")


def _require_conditions(knobs: Sequence[Knob], rows: np.ndarray, path: Path) -> None:
    """Require that the presence of a knob follows from the knobs before it.

    Otherwise no configuration could be proposed.
    """
    for column in np.flatnonzero(np.any(rows < 0, axis=0)).tolist():
        _, group = np.unique(rows[:, :column], axis=0, return_inverse=True)
        having = np.bincount(group, rows[:, column] >= 0)
        if ((having > 0) & (having < np.bincount(group))).any():
            raise UsageError(
                f"{path} has configurations with and without {knobs[column].name} that agree in all knobs before it; "
                "each must give it a value"
            )


def _knobs(domains: Mapping[str, Sequence[Value]], path: Path) -> tuple[Knob, ...]:
    if not domains:
        raise UsageError(f"{path} names no knob; its configurations must have at least one")
    if len(domains) > MAX_KNOBS:
        raise UsageError(f"{path} names {len(domains):,} knobs; it may have {MAX_KNOBS}")
    for name, values in domains.items():
        if not 0 < len(name) <= LONGEST_NAME:
            raise UsageError(
                f"{path} has a knob called {printable(name, 60)!r}; it must have 1 to {LONGEST_NAME} characters"
            )
        if not isinstance(values, list) or not values or not all(map(is_knob_value, values)):
            raise UsageError(
                f"{path} gives knob {name} no domain; it must be a list of finite numbers or texts, {LIMITS}"
            )
        if len(values) > MAX_VALUES:
            raise UsageError(f"{path} gives {name} {len(values):,} values; it may have {MAX_VALUES:,}")
    return tuple(Knob(name, tuple(values)) for name, values in domains.items())


def _index(knob: Knob, config: Mapping[str, Any], path: Path) -> int:
    """Return the position in the domain, -1 if the configuration lacks the knob."""
    if knob.name not in config:
        return -1
    value = config[knob.name]
    index = knob.index(value)
    if index is None and value in knob.values:  # True == 1 == 1.0
        alike = knob.values[knob.values.index(value)]
        raise UsageError(f"{path} writes one value of {knob.name} as {alike!r} and as {value!r}; it must have one type")
    if index is None:
        raise UsageError(f"{path}: {domain_error(knob)}, not {value!r}")
    return index


# A search on a recorded space, for benchmarks and demonstrations.
#
# What would have been compiled and timed is looked up.

RECORDED = "recorded:"
"""prefix of the device and the problem of a recorded space"""
REPLAY_OBJECTIVE = OBJECTIVES["speed"]
"""a recorded file has times, and seldom states the number of operations"""


class Replay:
    """A coordinator for which nothing has to be computed; the ledger and the display see no difference."""

    def __init__(
        self,
        space: RecordedSpace,
        sampler: str,
        seed: int,
        trials: int,
        seconds: float | None,
        ledger: Ledger,
        run: int,
        on_change: OnChange,
        on_finish: Callable[[int], None],
        spent: float = 0.0,
    ) -> None:
        """Create a replay. A `run` with trials continues; `spent` are the seconds that it took before."""
        past = run_past(ledger, run, (REPLAY_OBJECTIVE,))
        self.progress = Progress(trials, outcomes=past.outcomes, spent=spent)
        self._space, self._ledger, self._run = space, ledger, run
        self._seconds, self._on_change, self._on_finish = seconds, on_change, on_finish
        prior, said = recorded_figures(ledger, space, problem_of(space), device_of(space), RECORDED)
        self.progress.notes += said
        self.proposer = Proposer(space, sampler, seed, objectives=(REPLAY_OBJECTIVE,), prior=prior, past=past.trials)
        self._stop = False

    def stop(self) -> None:
        """Stop after the current trial."""
        self._stop = True

    def search(self) -> Progress:
        target = problem_of(self._space), device_of(self._space)
        self.progress.best = next(iter(self._ledger.best(*target, top=1, run=self._run)), None)
        while not self._stop and self.progress.done < self.progress.total:
            if self._seconds is not None and self.progress.spent + self.progress.elapsed > self._seconds:
                self.progress.ended = "time is up"
                return self.progress
            proposal = self.proposer.propose()
            if proposal is None:
                self.progress.ended = "every valid configuration was tried"
                return self.progress
            candidate = entry(self._space, proposal.config, self._run)
            trial = self._record(candidate, proposal.parents, proposal.operator)
            self.proposer.started(proposal, trial)
            self.proposer.tell(proposal, objective_values(candidate, (REPLAY_OBJECTIVE,)))
            self._on_finish(trial)
            self._on_change(self.progress)
        if self._stop:
            self.progress.ended = "interrupted"
        return self.progress

    def _record(self, c: Candidate, parents: tuple[int, ...], operator: str | None) -> int:
        assert c.outcome is not None  # the file says how each ended
        trial = self._ledger.add_ended(replace(c, parents=parents, operator=operator))
        self.progress.outcomes[c.outcome] += 1
        best = self.progress.best
        if c.measurement and (best is None or c.measurement.median_us < best.ranked_by.median_us):
            self.progress.best = self._ledger.candidate(trial)
        return trial


def entry(space: RecordedSpace, config: Config, run: int, trial: int = 0) -> Candidate:
    """Return a recorded configuration as a candidate."""
    milliseconds, device = space.time(config), device_of(space)
    figure = None
    if milliseconds is not None:
        samples = tuple((space.samples_of(config) * 1e3).tolist())
        figure = Measurement(Kind.RECORDED, device, None, milliseconds * 1e3, samples)
    reason = space.reason(config)
    outcome = Outcome.RECORDED if figure else failure(reason or "")
    return Candidate(trial, run, problem_of(space), device, dict(config), outcome, reason, device, measurement=figure)


def entries(space: RecordedSpace, run: int) -> Iterator[Candidate]:
    """Yield all recorded configurations as candidates."""
    return (entry(space, config, run, trial) for trial, config in enumerate(space.enumerate(), 1))


def failure(reason: str) -> Outcome:
    """Return the outcome for a recorded failure, by the terms of Kernel Tuner and T4."""
    word = reason.lower()
    if "compil" in word:
        return Outcome.UNCOMPILABLE
    if "timeout" in word:
        return Outcome.HUNG
    if "correct" in word:
        return Outcome.INCORRECT
    return Outcome.SCREENED if "constraint" in word or "invalid" in word else Outcome.CRASHED


def device_of(space: RecordedSpace) -> str:
    return space.device or "unknown"


def problem_of(space: RecordedSpace) -> str:
    return f"{RECORDED}{space.name}"
