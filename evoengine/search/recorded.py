"""Reads recorded search spaces: files in which every valid configuration of a kernel was measured beforehand.

Two formats, plain or gzipped: Kernel Tuner's cache (also a log cut short, without its closing braces) and the FAIR
benchmark suite's T4 results. A T4 file names no domains; they come from the T1 description where one is given, and
else from the values that occur.
"""

from __future__ import annotations

import ast
import gzip
import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from evoengine.errors import UsageError
from evoengine.records import Config, Value
from evoengine.space.definition import Knob, must_be

MILLISECONDS = {"milliseconds": 1.0, "miliseconds": 1.0, "ms": 1.0, "seconds": 1e3, "s": 1e3, "microseconds": 1e-3}
"""to milliseconds, by the `timeunit` of a T4 file; the hub's own files spell it with one l"""


@dataclass(frozen=True)
class RecordedSpace:
    """The recorded configurations, which are the valid ones. Offers samplers what `SearchSpace` does.

    rows: int16 [n, knobs], positions in the knobs' domains.
    times: float64 [n], the objective in milliseconds, NaN where the configuration failed.
    reasons: why it failed, by row number.
    metric: the name of a further figure the file carries (GFLOP/s, …), None where there is none.
    """

    path: Path
    kernel: str | None
    device: str | None
    knobs: tuple[Knob, ...]
    rows: np.ndarray
    times: np.ndarray
    reasons: Mapping[int, str]
    metric: str | None

    starts = ()

    @property
    def name(self) -> str:
        return self.path.name.removesuffix(".gz").removesuffix(".json")

    @property
    def optimum(self) -> float:
        """The least recorded time, ms."""
        return float(np.nanmin(self.times))

    def time(self, config: Config) -> float | None:
        """ms; None where the configuration failed. Raises UsageError where it was not recorded."""
        time = self.times[self._place(config)]
        return None if math.isnan(time) else float(time)

    def reason(self, config: Config) -> str | None:
        """Why a configuration failed; None where it did not."""
        return self.reasons.get(self._place(config))

    def __len__(self) -> int:
        return len(self.rows)

    def contains(self, config: Config) -> bool:
        positions = [knob.index(config.get(knob.name)) for knob in self.knobs]
        return len(config) == len(self.knobs) and tuple(positions) in self._places

    def is_active(self, knob: Knob, config: Config) -> bool:
        """Recorded spaces have no conditional knobs."""
        return True

    def sample(self, rng: np.random.Generator, n: int = 1) -> list[dict[str, Value]]:
        """n configurations, independent and uniform over the recorded ones."""
        return [self.decode(self.rows[i]) for i in rng.integers(len(self.rows), size=n)]

    def enumerate(self) -> Iterator[dict[str, Value]]:
        """Every recorded configuration once, in the order of the file."""
        return map(self.decode, self.rows)

    def neighbours(self, config: Config) -> list[dict[str, Value]]:
        """The recorded configurations one knob away, in the order of the file."""
        changed = (self.rows != self.encode(config)).sum(1)
        return [self.decode(row) for row in self.rows[changed == 1]]

    def encode(self, config: Config) -> np.ndarray:
        """Positions in the knobs' domains, int16 [knobs]. Raises UsageError on an unknown or missing value."""
        return np.array([_index(knob, config.get(knob.name), self.path) for knob in self.knobs], np.int16)

    def decode(self, row: Sequence[int] | np.ndarray) -> dict[str, Value]:
        """The configuration of an encoded row [knobs]; the inverse of `encode`."""
        return {knob.name: knob.values[i] for knob, i in zip(self.knobs, np.asarray(row).tolist(), strict=True)}

    @cached_property
    def _places(self) -> dict[tuple[int, ...], int]:
        return {tuple(row): i for i, row in enumerate(self.rows.tolist())}

    def _place(self, config: Config) -> int:
        place = self._places.get(tuple(self.encode(config).tolist()))
        if place is None:
            raise UsageError(f"{self.path}: {dict(config)} was not recorded; ask for a configuration of this space")
        return place


def read_recorded(path: Path, description: Path | None = None) -> RecordedSpace:
    """Reads a Kernel Tuner cache or T4 results; `description` is a T1 file that names the knobs and their domains.

    Raises UsageError where the file is neither, holds no configuration, or no time.
    """
    content = _load(path)
    if isinstance(content.get("cache"), dict):
        domains, entries = _cache_domains(content, path), [_cache_entry(e, path) for e in content["cache"].values()]
    elif isinstance(content.get("results"), list):
        domains, scale = None, _t4_scale(content, path)
        entries = [_t4_entry(e, scale, path) for e in content["results"]]
    else:
        raise UsageError(f"{path} is no recorded space: it must be a Kernel Tuner cache file or FAIR T4 results")
    if not entries:
        raise UsageError(f"{path} records no configuration; its cache must hold at least one")
    if description is not None:
        domains = read_domains(description)
    times = np.array([e.time for e in entries])
    if np.isnan(times).all():
        raise UsageError(f"{path} has no configuration with a time; at least one must have run")
    knobs = _knobs(domains or _occurring(entries), path)
    rows = [[_index(knob, e.config.get(knob.name), path) for knob in knobs] for e in entries]
    kernel, device = content.get("kernel_name"), content.get("device_name")
    reasons = {i: e.reason for i, e in enumerate(entries) if e.reason is not None}
    metric = next((e.metric for e in entries if e.metric), None)
    return RecordedSpace(path, kernel, device, knobs, np.array(rows, np.int16), times, reasons, metric)


def read_domains(path: Path) -> dict[str, list[Value]]:
    """Knob → values of a T1 description. Raises UsageError where the file is none."""
    try:
        parameters = _load(path)["ConfigurationSpace"]["TuningParameters"]
        return {p["Name"]: list(ast.literal_eval(str(p["Values"]))) for p in parameters}
    except (KeyError, TypeError, ValueError, SyntaxError) as error:
        raise UsageError(
            f"{path} is no T1 description: ConfigurationSpace.TuningParameters must list Name and Values"
        ) from error


@dataclass(frozen=True, slots=True)
class _Entry:
    config: Mapping[str, Value]
    time: float
    reason: str | None
    metric: str | None


def _load(path: Path) -> dict[str, Any]:
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw).decode()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}; give a recorded space") from error
    except (UnicodeDecodeError, EOFError, zlib.error) as error:
        raise UsageError(f"{path} is no recorded space: it must be JSON, plain or gzipped") from error
    content = _parsed(text)
    if not isinstance(content, dict):
        raise UsageError(f"{path} is no recorded space: it must be a JSON object, or a cache log of one")
    return content


def _parsed(text: str) -> Any:
    """JSON, or a cache log cut short: closed after its last whole entry. None where it is neither."""
    text = text.rstrip()
    whole = text[: text.rfind("},") + 1]
    for repaired in (text, text + "}", text.rstrip(",") + "}}", whole + "}}"):
        try:
            return json.loads(repaired)
        except json.JSONDecodeError:
            continue
    return None


def _cache_domains(content: Mapping[str, Any], path: Path) -> dict[str, list[Value]]:
    keys, domains = content.get("tune_params_keys"), content.get("tune_params")
    if not isinstance(keys, list) or not isinstance(domains, dict) or not set(keys) <= set(domains):
        raise UsageError(f"{path} is no Kernel Tuner cache: tune_params must give a domain to each of tune_params_keys")
    return {key: domains[key] for key in keys}


_CACHE_FIELDS = {
    *("time", "times", "compile_time", "verification_time", "benchmark_time", "strategy_time", "framework_time"),
    "timestamp",
}


def _cache_entry(entry: Any, path: Path) -> _Entry:
    if not isinstance(entry, dict) or "time" not in entry:
        raise UsageError(f"{path} has a configuration without time; each must carry one, or the failure in its place")
    time, reason = _time(entry["time"])
    metric = next((name for name in entry if name not in _CACHE_FIELDS and "/" in name), None)
    return _Entry(entry, time, reason, metric)


def _t4_entry(entry: Any, scale: float, path: Path) -> _Entry:
    """A result counts as run where its `invalidity` is "correct" and it has a measurement named by its objective."""
    if not isinstance(entry, dict) or not isinstance(entry.get("configuration"), dict):
        raise UsageError(f"{path} has a result without configuration; each T4 result must carry one")
    invalidity = entry.get("invalidity", "correct")
    if invalidity != "correct":
        return _Entry(entry["configuration"], math.nan, str(invalidity), None)
    measured = {m["name"]: m for m in entry.get("measurements", ())}
    found = next((measured[name] for name in ("time", *entry.get("objectives", ())) if name in measured), None)
    if found is None:
        raise UsageError(f"{path} has a result without time; each correct one must measure its objective")
    time, reason = _time(found["value"])
    unit = MILLISECONDS.get(found.get("unit", ""), scale)
    return _Entry(entry["configuration"], time * unit, reason, next((m for m in measured if m != "time"), None))


def _t4_scale(content: Mapping[str, Any], path: Path) -> float:
    unit = content.get("metadata", {}).get("timeunit", "milliseconds")
    if unit not in MILLISECONDS:
        raise UsageError(f"{path} has the timeunit {unit!r}; it must be one of {', '.join(MILLISECONDS)}")
    return MILLISECONDS[unit]


def _time(value: Any) -> tuple[float, str | None]:
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0:
        return float(value), None
    return math.nan, str(value)


def _occurring(entries: Sequence[_Entry]) -> dict[str, list[Value]]:
    domains: dict[str, dict[Value, None]] = {}
    for entry in entries:
        for name, value in entry.config.items():
            domains.setdefault(name, {})[value] = None
    return {
        name: list(values) if any(isinstance(v, str) for v in values) else sorted(values)
        for name, values in domains.items()
    }


def _knobs(domains: Mapping[str, Sequence[Value]], path: Path) -> tuple[Knob, ...]:
    for name, values in domains.items():
        if not isinstance(values, list) or not values or not all(isinstance(v, Value) for v in values):
            raise UsageError(f"{path} gives knob {name} no domain; it must be a list of numbers or texts")
    return tuple(Knob(name, tuple(values)) for name, values in domains.items())


def _index(knob: Knob, value: object, path: Path) -> int:
    index = knob.index(value)
    if index is None:
        raise UsageError(f"{path}: {must_be(knob)}, not {value!r}")
    return index
