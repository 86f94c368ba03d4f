"""The Optuna study of a run, in the ledger's database: a projection for optuna-dashboard, written as candidates finish.

The ledger's tables are the truth. A trial that cannot be projected does not stop the search: it is kept in
`Projection.missed` with the reason, for the search to show at its end, and the next search adds it (`add_missing`).
`rebuild` makes the whole study again from the ledger.

optuna-dashboard's page reads and draws all trials of a study at once, which takes many seconds and some 70 MB for
10,000; so a large study has a summary beside it.
"""

from __future__ import annotations

import json
import logging
import math
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from io import BytesIO
from itertools import product
from pathlib import Path
from typing import Any, cast

import optuna
from optuna.artifacts import ArtifactMeta, FileSystemArtifactStore
from optuna.distributions import CategoricalDistribution
from optuna.exceptions import ExperimentalWarning, OptunaError, StorageInternalError
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial
from sqlalchemy import URL, select, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from evoengine.errors import EvoengineError, NothingFound, UsageError
from evoengine.ledger.check import Fault
from evoengine.ledger.database import (
    engine_options,
    inspect_database,
    parse_url,
    set_pragmas,
    setup_lock,
    translate_errors,
)
from evoengine.ledger.integrity import RowReader
from evoengine.ledger.optuna.schema import delete_study, insert_trials, require_schema, study_prefix
from evoengine.ledger.read import Trial, read_numbered
from evoengine.ledger.rows import Reading, batches, last_verdicts, most_trusted_kind, to_record
from evoengine.ledger.store import Ledger
from evoengine.ledger.tables import CandidateRow, VerdictRow
from evoengine.ledger.transactions import FileLost
from evoengine.lineage import Effect, Step, effects, step, transition
from evoengine.objectives import Objective, objective_values, stored_objectives
from evoengine.paths import default_database
from evoengine.records import RUNNING, Config, Kind, Outcome, Value, Verdict
from evoengine.text import hide_passwords, markdown, plain

BATCH_SECONDS = 2.0
"""so seldom a study is written to: a transaction of its own for each trial costs more than the rest of the ledger"""
REASON_LENGTH = 200
CHANGE_LENGTH = 60
PAID = 20
"""changes of knobs in the study's note; so many fit into one of the 2,045-character attributes that optuna-dashboard
keeps it in"""

STORAGE_FAILS = (OptunaError, SQLAlchemyError, EvoengineError, FileLost, OSError)
"""what the study's side of the database, or the folder of its sources, may fail with"""
PROJECTING = (*STORAGE_FAILS, ValueError, LookupError)
"""what a projection may fail with; the ledger has it all, so none of it ends a search"""

logger = logging.getLogger(__name__)


def optuna_storage(database: str) -> RDBStorage:
    """Return Optuna's storage in a ledger's database. Raises UsageError if its schema is another Optuna's."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    url = parse_url(database)
    # Optuna makes its tables one by one, and another process must neither do the same nor judge them half-made
    with setup_lock(url), _explained(url):
        contents = inspect_database(url)
        if not contents.studies_half_made:  # then it makes the rest
            require_schema(contents.tables, contents.optuna_revision, hide_passwords(url.render_as_string()))
        storage = RDBStorage(
            url.render_as_string(hide_password=False), engine_kwargs=engine_options(url), skip_compatibility_check=True
        )
    if url.drivername == "sqlite":
        storage.engine.dispose()
        set_pragmas(storage.engine)
    return storage


def artifact_store(database: str) -> FileSystemArtifactStore:
    """Return the folder `artifacts` beside the SQLite file; beside the default one for a server's database."""
    url = parse_url(database)
    beside = url if url.drivername == "sqlite" else parse_url(default_database())
    folder = Path(beside.database or "").parent / "artifacts"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"the folder {folder}, where the study keeps its sources, cannot be made: {error.strerror}"
        ) from error
    return FileSystemArtifactStore(str(folder))


@contextmanager
def _explained(url: URL) -> Iterator[None]:
    """Translate errors of the database, those included that Optuna wrapped in its own."""
    with translate_errors(url):
        try:
            yield
        except StorageInternalError as error:
            raise error.__cause__ or error from None


class Projection:
    """The study of one run and one kind of figure. Give it each trial once, when it is finished."""

    def __init__(
        self,
        storage: RDBStorage,
        ledger: Ledger,
        run: int,
        kind: Kind,
        domains: Mapping[str, Sequence[Value]],
        suffix: str = "",
    ) -> None:
        """Create or open the study. `domains` has each knob's values; `suffix` ends the study's name.

        Raises UsageError if the database has been locked for too long.
        """
        self._storage, self._ledger, self._run, self._kind = storage, ledger, run, kind
        self._artifacts = artifact_store(ledger.url)
        self._distributions = {name: CategoricalDistribution(tuple(values)) for name, values in domains.items()}
        self._known_places: dict[tuple[str, type, Value], float] = {}
        self.name = study_name(ledger, run, kind) + suffix
        self._objectives = stored_objectives(ledger.run(run).objectives)
        self.missed: dict[int, str] = {}
        """trial → why it is not in the study"""
        self.missed_before: dict[int, str] = {}
        """the same of the studies of earlier runs"""
        self._waiting: list[int] = []
        """finished trials that are still to be written"""
        self._written_at = -BATCH_SECONDS
        self._run_ended = False
        self._failed: str | None = None
        """why nothing more is written: each further trial would wait for the same failure"""
        ledger.database.watch(storage.engine)
        with _explained(parse_url(ledger.url)), warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            study = optuna.create_study(
                storage=storage,
                study_name=self.name,
                load_if_exists=True,
                directions=[o.direction for o in self._objectives],
            )
            study.set_metric_names([f"{o.title} ({kind})" if o.timed else o.title for o in self._objectives])
            self._study_id = storage.get_study_id_from_name(self.name)

    @property
    def all_missed(self) -> dict[int, str]:
        return self.missed_before | self.missed

    def add(self, trial: int) -> None:
        """Have a finished candidate written, with others that finish within BATCH_SECONDS.

        What goes wrong is kept in `missed`.
        """
        self._waiting.append(trial)
        self.write_due()

    def write_due(self) -> None:
        """Write what waits, unless something was written a moment ago."""
        if self._waiting and time.monotonic() - self._written_at >= BATCH_SECONDS:
            self.write()

    def write(self) -> None:
        """Write what waits; what goes wrong is kept in `missed`."""
        trials, self._waiting = self._waiting, []
        for some in batches(trials):
            if self._failed is None:
                self._try(some)
            else:
                self.missed |= dict.fromkeys(some, self._failed)
        self._written_at = time.monotonic()

    def _try(self, trials: Sequence[int]) -> None:
        try:
            for some in read_study_trials(self._ledger.database.reading, trials, self._kind, self._objectives):
                self._insert(some)
        except PROJECTING as error:
            storage_fails = isinstance(error, STORAGE_FAILS)
            if len(trials) > 1 and not storage_fails:
                for trial in trials:  # so that one that cannot be shown hides no other
                    self._try([trial])
                return
            reason = _one_line(error)
            self.missed |= dict.fromkeys(trials, reason)
            if storage_fails:
                self._failed = reason

    def _insert(self, some: Sequence[StudyTrial]) -> None:
        """Insert trials in one transaction, numbered after those of the study."""
        due = [shown for shown in some if self._run_ended or not shown.unfinished]
        placed = [(shown, places) for shown in due if (places := self._places(shown)) is not None]
        whole = [(shown, places, self._keep_source(shown)) for shown, places in placed]
        with _explained(parse_url(self._ledger.url)), self._storage.engine.begin() as connection:
            insert_trials(connection, self._study_id, whole, self._distributions)

    def complete(self) -> None:
        """Add the finished trials of the run that the study misses; what goes wrong is kept in `missed`.

        Trials whose gate was not finished are added once the run has ended: until then they may still be ranked.
        """
        try:
            self._run_ended = self._ledger.run(self._run).status != RUNNING
            known = self._storage.get_all_trials(self._study_id, deepcopy=False)
            finished = self._ledger.finished_trials(self._run).get(self._run, [])
        except PROJECTING as error:
            self._failed = _one_line(error)
            return
        self._failed, self.missed = None, {}
        projected = {trial.user_attrs.get("trial") for trial in known}
        self._waiting = [number for number in finished if number not in projected]
        self.write()

    def end_run(self, status: str) -> None:
        """End the run with a complete study, also if it is killed meanwhile, and note what paid."""
        self.write()
        self._ledger.finish_run(self._run, status)
        self.complete()  # trials that were in flight, or that an unavailable database delayed
        self.summarise()

    def fill(self, trials: Sequence[int], on_done: Callable[[int], None]) -> None:
        """Write finished candidates at once, numbered in their order; what goes wrong is raised.

        `on_done` is told how many are written.
        """
        done = 0
        self._run_ended = True
        for some in read_study_trials(self._ledger.database.reading, trials, self._kind, self._objectives):
            self._insert(some)
            done += len(some)
            on_done(done)

    def _places(self, shown: StudyTrial) -> dict[str, float] | None:
        """Return the index of each value in its knob's domain; None, with the trial missed, where it has none."""
        places: dict[str, float] = {}
        try:
            for knob, value in shown.config.items():
                key = knob, type(value), value
                if key not in self._known_places:
                    self._known_places[key] = self._distributions[knob].to_internal_repr(value)
                places[knob] = self._known_places[key]
        except PROJECTING as error:
            self.missed[shown.trial] = _one_line(error)
            return None
        return places

    def summarise(self) -> None:
        """Write the study's own note: which changes of knobs paid so far. What goes wrong is logged."""
        if self._failed is not None:
            return
        try:
            self._write_note("dashboard", study_note(effects(self._ledger.trials(run=self._run, ranked=True))))
        except PROJECTING as error:
            logger.warning(
                "the note on effective knob changes could not be added to the Optuna study: %s", _one_line(error)
            )

    def _keep_source(self, shown: StudyTrial) -> dict[str, str]:
        """Keep the source as an artifact, once, by its SHA-256; return the attribute that links it.

        Optuna's own `upload_artifact` cannot link to a trial that is written finished.
        """
        key = shown.source_sha256
        text = self._ledger.source_text(key) if key else None
        if key is None or text is None:
            return {}
        self._artifacts.write(key, BytesIO(text.encode()))
        meta = ArtifactMeta(artifact_id=key, filename=f"trial-{shown.trial}.cu", mimetype="text/plain", encoding=None)
        return {f"artifacts:{key}": json.dumps(asdict(meta))}

    def _write_note(self, prefix: str, body: str) -> None:
        """Write a note as optuna-dashboard's `save_note`, which would first read every note of the study."""
        self._storage.set_study_system_attr(self._study_id, f"{prefix}:note_ver", 1)
        self._storage.set_study_system_attr(self._study_id, f"{prefix}:note_str:0", body)


def begin_study(ledger: Ledger, run: int, kind: Kind, domains: Mapping[str, Sequence[Value]]) -> Projection:
    """Open the study of a run of this process, complete it, and complete those of earlier runs."""
    storage = optuna_storage(ledger.url)
    study = Projection(storage, ledger, run, kind, domains)
    study.missed_before = add_missing(storage, ledger)
    study.complete()
    return study


def rebuild(
    storage: RDBStorage,
    ledger: Ledger,
    run: int,
    kind: Kind,
    domains: Mapping[str, Sequence[Value]],
    on_done: Callable[[int], None] = lambda done: None,
    *,
    trials: Sequence[int] | None = None,
    suffix: str = "",
) -> Projection:
    """Make the study of a run again, from the ledger alone; an old one goes, with what was typed into its notes.

    It has the finished `trials`, or all that the run has. `suffix` ends its name.
    """
    with storage.engine.begin() as connection:
        delete_study(connection, study_name(ledger, run, kind) + suffix)
    projection = Projection(storage, ledger, run, kind, domains, suffix)
    projection.fill(ledger.finished_trials(run).get(run, []) if trials is None else trials, on_done)
    projection.summarise()
    return projection


def add_missing(storage: RDBStorage, ledger: Ledger) -> dict[int, str]:
    """Add to the studies of ended searches the finished trials that they miss, as a killed one leaves.

    Return trial → reason of those that still cannot be added.

    Studies of imported runs are the import's. Few queries where nothing is missing. What goes wrong is logged.
    """
    try:
        return _add_missing(storage, ledger)
    except PROJECTING as error:
        logger.warning("the Optuna studies of earlier runs could not be completed: %s", _one_line(error))
        return {}


def _add_missing(storage: RDBStorage, ledger: Ledger) -> dict[int, str]:
    missed: dict[int, str] = {}
    finished = ledger.finished_trials()
    counts = trial_counts(storage)
    ended = [r for r in ledger.runs() if r.status != RUNNING and r.imported_from is None and r.id in finished]
    for run, kind in product(ended, Kind):
        name = study_name(ledger, run.id, kind)
        if name not in counts or counts[name] >= len(finished[run.id]):
            continue
        known = storage.get_all_trials(storage.get_study_id_from_name(name), deepcopy=False)
        if not known and run.conditions is not None:
            continue  # it may go on, and then knows every value that its knobs have
        projection = Projection(storage, ledger, run.id, kind, _domains(known, ledger, run.id))
        projection.complete()
        projection.summarise()
        missed |= projection.missed
    return missed


def trial_counts(storage: RDBStorage) -> dict[str, int]:
    """Return the number of trials of each study, by its name."""
    with storage.engine.connect() as connection:
        return {name: count for name, count in connection.execute(_COUNTS)}


_COUNTS = text(
    "SELECT studies.study_name, count(trials.trial_id) FROM studies LEFT JOIN trials USING (study_id) "
    "GROUP BY studies.study_name"
)


def _domains(known: Sequence[FrozenTrial], ledger: Ledger, run: int) -> dict[str, list[Value]]:
    """Return each knob's values as the study has them, for Optuna takes no others; else those that occur."""
    domains = run_domains(ledger, run)
    for trial in known:
        for knob, distribution in trial.distributions.items():
            if isinstance(distribution, CategoricalDistribution):
                domains[knob] = [cast(Value, choice) for choice in distribution.choices]
    return domains


def _one_line(error: Exception) -> str:
    told = " ".join(hide_passwords(str(error)).split())
    return f"{type(error).__name__}: {told[:REASON_LENGTH]}"


def study_name(ledger: Ledger, run: int, kind: Kind) -> str:
    described = ledger.run(run)
    aims = ", ".join(o.title for o in stored_objectives(described.objectives))
    return plain(f"{study_prefix(run)}{described.problem} · {described.gpu} · {kind} {aims}")


def study_note(found: Sequence[Effect]) -> str:
    """Return as Markdown which changes of knobs paid, in the order of `found`, which `effects` returns."""
    if not found:
        return "No trial was made from another yet: start points have no parents, and most samplers name none."
    lines = ["| change | steps | alone | better | median gain |", "|---|---|---|---|---|"]
    for e in found[:PAID]:
        change = markdown(transition(e.change), CHANGE_LENGTH)
        lines.append(f"| {change} | {e.steps} | {e.alone} | {e.better} | {e.median_gain - 1:+.1%} |")
    if len(found) > PAID:
        lines.append(f"\n{len(found) - PAID} more: evoengine report")
    return "\n".join(lines)


# ── studies that do not agree with the ledger ─────────────────────────────────────────────────────────────────────────


_TRIALS = text(
    "SELECT studies.study_name, attributes.value_json FROM studies "
    "JOIN trials ON trials.study_id = studies.study_id "
    "LEFT JOIN trial_user_attributes AS attributes ON attributes.trial_id = trials.trial_id "
    "AND attributes.key = 'trial'"
)


def study_faults(storage: RDBStorage, ledger: Ledger) -> list[Fault]:
    """Return the studies of ended runs that have not each finished trial once.

    Figures that were taken later, as in finals, are the ledger's alone.
    """
    return [
        Fault(f"the study of run {run} ({kind}) has {has:,} trials, {right:,} of the {finished:,} that ended", True)
        for run, kind, has, right, finished in _differing(storage, ledger)
    ]


def repair_studies(storage: RDBStorage, ledger: Ledger) -> None:
    for run, kind, *_ in _differing(storage, ledger):
        rebuild(storage, ledger, run, kind, run_domains(ledger, run))


def rebuild_studies(storage: RDBStorage, ledger: Ledger, run: int, on_done: Callable[[int], None]) -> list[Projection]:
    """Rebuild the studies of a run; where it has none, make that of its most trusted figures.

    Raises NothingFound if no trial of it has ended.
    """
    if run not in ledger.finished_trials(run):
        raise NothingFound(f"no trial of run {run} has ended, so its study is empty")
    held = trial_counts(storage)
    kinds = [kind for kind in Kind if study_name(ledger, run, kind) in held]
    if not kinds:
        kinds = [most_trusted_kind(t.measurement for t in ledger.trials(run=run, ranked=True) if t.measurement)]
    domains = run_domains(ledger, run)
    return [rebuild(storage, ledger, run, kind, domains, on_done) for kind in kinds]


def _differing(storage: RDBStorage, ledger: Ledger) -> list[tuple[int, Kind, int, int, int]]:
    """Return run, kind, and the numbers of trials in the study, of right ones among them, and of finished ones."""
    found: dict[str, Counter[str | None]] = {name: Counter() for name in trial_counts(storage)}
    with storage.engine.connect() as connection:
        for name, trial in connection.execute(_TRIALS):
            found[name][trial] += 1
    finished = ledger.finished_trials()
    ended = [run.id for run in ledger.runs() if run.status != RUNNING]
    differing = []
    for run, kind in product(ended, Kind):
        has = found.get(study_name(ledger, run, kind))
        trials = {str(trial) for trial in finished.get(run, ())}
        if has is not None and (has.keys() != trials or has.total() != len(trials)):
            differing.append((run, kind, has.total(), len(has.keys() & trials), len(trials)))
    return differing


def run_domains(ledger: Ledger, run: int) -> dict[str, list[Value]]:
    """Return the values of each knob that occur in a run."""
    occurring: dict[str, dict[Value, None]] = {}
    for trial in ledger.trials(run=run):
        for knob, value in trial.config.items():
            occurring.setdefault(knob, {})[value] = None
    return {knob: list(values) for knob, values in occurring.items()}


# ── what a study shows of a trial ─────────────────────────────────────────────────────────────────────────────────────


CHANGED_LENGTH = 500
"""characters of what was changed of a trial's parent"""
_further_of = RowReader(CandidateRow, ("occupancy", "source_sha256", "created_at", "finished_at"))


@dataclass(frozen=True, slots=True)
class StudyTrial:
    """A finished trial as the study has it."""

    trial: int
    config: Config
    values: tuple[float, ...] | None
    """for each objective; None of one that is not ranked by a figure of the study's kind, which is pruned"""
    unfinished: bool
    """whether its search may still finish the gate for it"""
    attributes: Mapping[str, object]
    source_sha256: str | None
    started: datetime
    finished: datetime | None


def read_study_trials(
    reading: Reading, trials: Sequence[int], kind: Kind, objectives: Sequence[Objective]
) -> Iterator[list[StudyTrial]]:
    """Yield the study trials of these numbers in batches, in their order, with figures of one kind."""
    for some in batches(trials):
        listed = list(read_numbered(reading, some, resources=True, kind=kind))
        parents = sorted({parent for trial in listed for parent in trial.parents})
        known = {t.trial: t for t in read_numbered(reading, parents, kind=kind)}
        with reading() as session:
            further = _further(session, [trial.trial for trial in listed])
            errors = _largest_errors(session, [trial.trial for trial in listed])
        yield [_shown(t, objectives, step(t, known), errors.get(t.trial), *further[t.trial]) for t in listed]


def _further(session: Session, trials: Sequence[int]) -> dict[int, tuple[Any, ...]]:
    rows = session.execute(select(*_further_of.columns).where(CandidateRow.id.in_(trials)))
    return {number: tuple(values) for number, *values in map(_further_of.read, rows)}


def _largest_errors(session: Session, trials: Sequence[int]) -> dict[int, float | None]:
    """Return each trial's largest error in the gate's last verdict."""
    of_trials = select(VerdictRow).where(VerdictRow.candidate_id.in_(trials)).order_by(VerdictRow.id)
    held: dict[int, list[VerdictRow]] = {}
    for row in session.scalars(of_trials):
        held.setdefault(row.candidate_id, []).append(row)
    last = {trial: last_verdicts([to_record(Verdict, row) for row in rows])["verdict"] for trial, rows in held.items()}
    return {trial: verdict.max_error for trial, verdict in last.items() if verdict}


def _shown(
    t: Trial,
    objectives: Sequence[Objective],
    made: Step,
    max_error: float | None,
    occupancy: float | None,
    source_sha256: str | None,
    started: datetime,
    finished: datetime | None,
) -> StudyTrial:
    figure = t.measurement
    shown = {
        "trial": t.trial,
        "outcome": str(t.outcome),
        "reason": t.reason,
        "registers": t.binary and t.binary.registers,
        "spill_bytes": t.binary and t.binary.spill_bytes,
        "shared_bytes": t.shared_bytes,
        "occupancy": occupancy,
        "max_abs_error": max_error,
        "source_sha256": source_sha256,
        "parents": list(t.parents),
        "operator": t.operator,
        "changed": _changed(made),
        "median_us": figure and figure.median_us,
        "kind": figure and str(figure.kind),
    }
    texts = {name: plain(value) for name, value in shown.items() if isinstance(value, str)}
    attributes = {name: value for name, value in (shown | texts).items() if value not in (None, [])}
    trusted = figure is not None and not figure.suspect and t.outcome is not None and t.outcome.ranked
    values = objective_values(t, objectives) if trusted else None
    unfinished = t.outcome is Outcome.UNFINISHED
    return StudyTrial(t.trial, t.config, values, unfinished, attributes, source_sha256, started, finished)


def _changed(made: Step) -> str | None:
    """Return the change, as in `tile_m 64→128: +25.0% over #1`; None for a trial without a parent."""
    if not made.changes or made.parent is None:
        return None
    gain = f": {made.gain - 1:+.1%} over #{made.parent.trial}" if made.gain is not None else ""
    return f"{', '.join(map(transition, made.changes))[:CHANGED_LENGTH]}{gain}"


# ── summaries of large studies ────────────────────────────────────────────────────────────────────────────────────────


SUMMARY_TRIALS = 1000
"""trials of a study, of which the dashboard's page is there within a second or two"""
SUMMARY = " · summary"
"""behind the name of the study that is summarised"""


def summarise_large_studies(storage: RDBStorage, ledger: Ledger, most: int = SUMMARY_TRIALS) -> list[str]:
    """Write a summary of each study of more than `most` trials, in place of an older one; return their names.

    A summary shows its study as it is when the summary is written.
    """
    counts, finished = trial_counts(storage), ledger.finished_trials()
    written = []
    for run in ledger.runs():
        for kind in Kind:
            name = study_name(ledger, run.id, kind)
            if counts.get(name, 0) > most:
                listed = ledger.trials(run=run.id, ranked=True)
                ranked = [t for t in listed if t.measurement and t.measurement.kind is kind]
                chosen, domains = choose_trials(ranked, finished[run.id], most), run_domains(ledger, run.id)
                rebuild(storage, ledger, run.id, kind, domains, trials=chosen, suffix=SUMMARY)
                written.append(name + SUMMARY)
    return written


def choose_trials(ranked: Sequence[Trial], finished: Sequence[int], most: int = SUMMARY_TRIALS) -> list[int]:
    """Return at most `most` of the `finished` trials in their order.

    They are the fastest, those that were the fastest when they ended, the parents of both, and of the rest one in so
    many.
    """
    matter = {t.trial: t for t in [*sorted(ranked, key=_time)[: most // 2], *_leading(ranked)[-(most // 4) :]]}
    parents = {parent for t in matter.values() for parent in t.parents} & set(finished)
    kept = {*matter, *sorted(parents - matter.keys())[: most - len(matter)]}
    rest = [trial for trial in finished if trial not in kept]
    if rest and (room := most - len(kept)):
        kept.update(rest[:: math.ceil(len(rest) / room)])
    return [trial for trial in finished if trial in kept]


def _leading(ranked: Iterable[Trial]) -> list[Trial]:
    """Return the trials that were faster than all before them."""
    leading: list[Trial] = []
    for trial in ranked:
        if not leading or _time(trial) < _time(leading[-1]):
            leading.append(trial)
    return leading


def _time(trial: Trial) -> tuple[bool, float]:
    assert trial.measurement is not None
    return trial.measurement.rank_key
