"""The Optuna study of a run, in the ledger's database: a projection for optuna-dashboard, written as candidates finish.

The ledger's tables are the truth. A trial that cannot be projected does not stop the search: it is kept in
`Projection.missed` with the reason, for the search to show at its end, and the next search adds it (`add_missing`).
`rebuild` makes the whole study again from the ledger.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from io import BytesIO
from itertools import product
from pathlib import Path

import optuna
from optuna.artifacts import ArtifactMeta, FileSystemArtifactStore
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.exceptions import ExperimentalWarning, OptunaError, StorageInternalError
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy import URL, text
from sqlalchemy.exc import SQLAlchemyError

from evoengine.errors import EvoengineError, UsageError
from evoengine.ledger.database import (
    engine_options,
    inspect_database,
    parse_url,
    set_pragmas,
    setup_lock,
    translate_errors,
)
from evoengine.ledger.optuna_schema import require_schema, study_prefix
from evoengine.ledger.rows import most_trusted
from evoengine.ledger.runs import RUNNING, Run
from evoengine.ledger.store import Ledger
from evoengine.ledger.watch import FileLost
from evoengine.lineage import Effect, Step, effects, step, transition
from evoengine.objectives import Objective, objective_values, stored_objectives
from evoengine.passwords import hide_passwords
from evoengine.paths import default_database
from evoengine.records import Candidate, Kind, Measurement, Value
from evoengine.text import markdown, plain

ATTRIBUTES = (
    "trial",
    "outcome",
    "reason",
    "registers",
    "spill_bytes",
    "shared_bytes",
    "occupancy",
    "max_abs_error",
    "source_sha256",
    "parents",
    "operator",
)
"""fields of a candidate's JSON that a trial carries as user attributes, with median_us and kind of its figure"""
CELL_LENGTH = 200
"""of a note's cells, so that a note fits into one of the 2,045-character attributes optuna-dashboard keeps it in"""
CHANGE_LENGTH = 60
PAID = 20
"""changes of knobs in the study's note; so many fit into one attribute too"""

STORAGE_FAILS = (OptunaError, SQLAlchemyError, EvoengineError, FileLost, OSError)
"""what the study's side of the database, or the folder of its sources, may fail with"""
PROJECTING = (*STORAGE_FAILS, ValueError, LookupError)
"""what a projection may fail with; the ledger has it all, so none of it ends a search"""

logger = logging.getLogger(__name__)


def optuna_storage(database: str) -> RDBStorage:
    """Optuna's side of a ledger's database; raises UsageError where its tables are of another Optuna's schema."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    url = parse_url(database)
    # Optuna makes its tables one by one, and another process must neither do the same nor judge them half-made
    with setup_lock(url), _explained(url):
        contents = inspect_database(url)
        require_schema(contents.tables, contents.optuna_revision, hide_passwords(url.render_as_string()))
        storage = RDBStorage(
            url.render_as_string(hide_password=False), engine_kwargs=engine_options(url), skip_compatibility_check=True
        )
    if url.drivername == "sqlite":
        storage.engine.dispose()
        set_pragmas(storage.engine)
    return storage


def artifact_store(database: str) -> FileSystemArtifactStore:
    """The folder `artifacts` beside the SQLite file; beside the default one for a server's database."""
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
    """As `explained`, for errors that Optuna has wrapped in its own."""
    with translate_errors(url):
        try:
            yield
        except StorageInternalError as error:
            raise error.__cause__ or error from None


class Projection:
    """The study of one run and one kind of figure. Give it each trial once, when it is finished."""

    def __init__(
        self, storage: RDBStorage, ledger: Ledger, run: int, kind: Kind, domains: Mapping[str, Sequence[Value]]
    ) -> None:
        """`domains`: each knob's values, the same for all trials of the run.

        Raises UsageError where the database has been locked for too long.
        """
        self._storage, self._ledger, self._run, self._kind = storage, ledger, run, kind
        self._artifacts = artifact_store(ledger.url)
        self._distributions = {name: CategoricalDistribution(tuple(values)) for name, values in domains.items()}
        self.name = study_name(ledger, run, kind)
        self._objectives = stored_objectives(_described(ledger, run).objectives)
        self.missed: dict[int, str] = {}
        """trial → why it is not in the study"""
        self._failed: str | None = None
        """why nothing more is written: each further trial would wait for the same failure"""
        ledger.watch(storage.engine)
        with _explained(parse_url(ledger.url)), warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            study = optuna.create_study(
                storage=storage, study_name=self.name, load_if_exists=True,
                directions=[o.direction for o in self._objectives],
            )  # fmt: skip
            study.set_metric_names([_metric(o, kind) for o in self._objectives])
            self._study_id = storage.get_study_id_from_name(self.name)

    def add(self, trial: int) -> None:
        """Writes a finished candidate; what goes wrong is kept in `missed`."""
        if self._failed is not None:
            self.missed[trial] = self._failed
            return
        try:
            candidate, figure = self._ledger.candidate(trial), self._figure(trial)
            number = self._storage.create_new_trial(self._study_id, self._frozen(candidate, figure))
            parents = {parent: self._ledger.candidate(parent) for parent in candidate.parents}
            self._write_note(f"dashboard:{number}", note(candidate, figure, step(candidate, parents)))
        except PROJECTING as error:
            self.missed[trial] = reason = _one_line(error)
            if isinstance(error, STORAGE_FAILS):
                self._failed = reason

    def summarise(self) -> None:
        """Writes the study's own note: which changes of knobs paid so far. What goes wrong is logged."""
        if self._failed is not None:
            return
        try:
            self._write_note("dashboard", study_note(effects(self._ledger.trials(run=self._run, ranked=True))))
        except PROJECTING as error:
            logger.warning("the Optuna study has no note of what paid: %s", _one_line(error))

    def _figure(self, trial: int) -> Measurement | None:
        return most_trusted([m for m in self._ledger.measurements(trial) if m.kind is self._kind])

    def _frozen(self, candidate: Candidate, figure: Measurement | None) -> FrozenTrial:
        """Ranked candidates are complete with their values; the others pruned, without any."""
        trusted = figure is not None and not figure.suspect
        values = objective_values(replace(candidate, measurement=figure), self._objectives) if trusted else None
        distributions: dict[str, BaseDistribution] = {name: self._distributions[name] for name in candidate.config}
        frozen = optuna.trial.create_trial(
            state=TrialState.COMPLETE if values else TrialState.PRUNED,
            values=values,
            params=dict(candidate.config),
            distributions=distributions,
            user_attrs=attributes(candidate, figure),
            system_attrs=self._keep_source(candidate),
        )
        created, finished = self._ledger.span(candidate.trial)
        # Optuna keeps local time without a zone
        frozen.datetime_start = created.astimezone().replace(tzinfo=None)
        frozen.datetime_complete = finished and finished.astimezone().replace(tzinfo=None)
        return frozen

    def _keep_source(self, candidate: Candidate) -> dict[str, str]:
        """The source as an artifact, named by its sha256 so that it is kept once; and the attribute that links it.

        Optuna's own `upload_artifact` cannot link to a trial that is written finished.
        """
        if candidate.source is None:
            return {}
        key = candidate.source.sha256
        self._artifacts.write(key, BytesIO(candidate.source.text.encode()))
        name = f"trial-{candidate.trial}.cu"
        meta = ArtifactMeta(artifact_id=key, filename=name, mimetype="text/plain", encoding=None)
        return {f"artifacts:{key}": json.dumps(asdict(meta))}

    def _write_note(self, prefix: str, body: str) -> None:
        """As optuna-dashboard's `save_note` does, which reads every note of the study to write one."""
        self._storage.set_study_system_attr(self._study_id, f"{prefix}:note_ver", 1)
        self._storage.set_study_system_attr(self._study_id, f"{prefix}:note_str:0", body)


def rebuild(
    storage: RDBStorage, ledger: Ledger, run: int, kind: Kind, domains: Mapping[str, Sequence[Value]]
) -> Projection:
    """The study of a run made again, from the ledger alone; an old one goes, with what was typed into its notes."""
    name = study_name(ledger, run, kind)
    if name in optuna.get_all_study_names(storage):
        optuna.delete_study(study_name=name, storage=storage)
    projection = Projection(storage, ledger, run, kind, domains)
    for trial in [t.trial for t in ledger.trials(run=run) if t.outcome]:
        projection.add(trial)
    projection.summarise()
    return projection


def add_missing(storage: RDBStorage, ledger: Ledger) -> dict[int, str]:
    """Adds to the studies of ended searches the finished trials that they miss, as a killed one leaves; trial → reason
    of those that still cannot be added.

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
    with storage.engine.connect() as connection:
        counts: dict[str, int] = {name: count for name, count in connection.execute(_COUNTS)}
    ended = [r for r in ledger.runs() if r.status != RUNNING and r.imported_from is None and r.id in finished]
    for run, kind in product(ended, Kind):
        name = study_name(ledger, run.id, kind)
        if name not in counts or counts[name] >= len(finished[run.id]):
            continue
        known = storage.get_all_trials(storage.get_study_id_from_name(name), deepcopy=False)
        projected = {trial.user_attrs.get("trial") for trial in known}
        projection = Projection(storage, ledger, run.id, kind, _domains(known, ledger.candidates(run=run.id)))
        for number in finished[run.id]:
            if number not in projected:
                projection.add(number)
        projection.summarise()
        missed |= projection.missed
    return missed


_COUNTS = text(
    "SELECT studies.study_name, count(trials.trial_id) FROM studies LEFT JOIN trials USING (study_id) "
    "GROUP BY studies.study_name"
)


def _domains(known: Sequence[FrozenTrial], candidates: Sequence[Candidate]) -> dict[str, list[Value]]:
    """Each knob's values as the study has them, for Optuna takes no others; else those that occur."""
    occurring: dict[str, dict[Value, None]] = {}
    for candidate in candidates:
        for knob, value in candidate.config.items():
            occurring.setdefault(knob, {})[value] = None
    domains = {knob: list(values) for knob, values in occurring.items()}
    for trial in known:
        for knob, distribution in trial.distributions.items():
            if isinstance(distribution, CategoricalDistribution):
                domains[knob] = list(distribution.choices)  # type: ignore[arg-type]
    return domains


def _one_line(error: Exception) -> str:
    told = " ".join(hide_passwords(str(error)).split())
    return f"{type(error).__name__}: {told[:CELL_LENGTH]}"


def study_name(ledger: Ledger, run: int, kind: Kind) -> str:
    described = _described(ledger, run)
    aims = ", ".join(o.title for o in stored_objectives(described.objectives))
    return plain(f"{study_prefix(run)}{described.problem} · {described.gpu} · {kind} {aims}")


def _described(ledger: Ledger, run: int) -> Run:
    return next(r for r in ledger.runs() if r.id == run)


def _metric(objective: Objective, kind: Kind) -> str:
    return f"{objective.title} ({kind})" if objective.timed else objective.title


def attributes(candidate: Candidate, figure: Measurement | None) -> dict[str, object]:
    """What a trial shows beside its parameters and value; what the candidate has not is left out."""
    public = candidate.to_json()
    shown = {name: public[name] for name in ATTRIBUTES}
    shown["median_us"], shown["kind"] = (figure.median_us, str(figure.kind)) if figure else (None, None)
    texts = {name: plain(value) for name, value in shown.items() if isinstance(value, str)}
    return {name: value for name, value in (shown | texts).items() if value not in (None, [])}


def note(candidate: Candidate, figure: Measurement | None, made: Step) -> str:
    """A short table in Markdown; `made` is the step from the faster parent."""
    public, binary = candidate.to_json(), candidate.binary
    rows = {"outcome": f"{candidate.outcome}{f': {candidate.reason}' if candidate.reason else ''}"}
    if figure:
        tflops = f"{figure.tflops:,.4g}, " if figure.tflops is not None else ""
        rows[f"TFLOPS ({figure.kind})" if tflops else str(figure.kind)] = f"{tflops}median {figure.median_us:,.1f} µs"
    if binary:
        rows["registers"] = f"{binary.registers}, {binary.spill_bytes} bytes spilled"
        rows["shared memory"] = f"{public['shared_bytes']} bytes"
    if candidate.occupancy is not None:
        rows["occupancy"] = f"{candidate.occupancy:.0%}"
    if candidate.verdict and candidate.verdict.max_error is not None:
        rows["largest error"] = f"{candidate.verdict.max_error:.2e}"
    if candidate.operator:
        rows["origin"] = f"{candidate.operator} {' × '.join(f'#{p}' for p in candidate.parents)}".strip()
    if made.changes:
        gain = f": {made.gain - 1:+.1%} over #{made.parent.trial}" if made.parent and made.gain is not None else ""
        rows["changed"] = ", ".join(map(transition, made.changes)) + gain
    lines = [f"| trial | {candidate.trial} |", "|---|---|"]
    for name, value in rows.items():
        lines.append(f"| {name} | {markdown(' '.join(value.split()), CELL_LENGTH)} |")
    return "\n".join(lines)


def study_note(found: Sequence[Effect]) -> str:
    """Which changes of knobs paid, in Markdown, most rewarding first; `found` as `effects` orders them."""
    if not found:
        return "No trial was made from another yet: start points have no parents, and most samplers name none."
    lines = ["| change | steps | alone | better | median gain |", "|---|---|---|---|---|"]
    for e in found[:PAID]:
        change = markdown(transition(e.change), CHANGE_LENGTH)
        lines.append(f"| {change} | {e.steps} | {e.alone} | {e.better} | {e.median_gain - 1:+.1%} |")
    if len(found) > PAID:
        lines.append(f"\n{len(found) - PAID} more: evoengine report")
    return "\n".join(lines)
