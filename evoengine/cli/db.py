"""evoengine db: maintenance of the ledger"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import click

from evoengine.cli.options import CheckedGroup, db_option, reading, say_which
from evoengine.cli.output import display, say
from evoengine.errors import MachineError, NothingFound, UsageError, hint
from evoengine.paths import chosen_database
from evoengine.records import RUNNING


@click.group(cls=CheckedGroup)
def db() -> None:
    """Check, upgrade, back up or prune the ledger, or rebuild the Optuna study of a run."""


@db.command()
@click.option("--repair", is_flag=True, help="Rebuild derived data: rankings, states, studies, indexes, views.")
@db_option
def check(repair: bool, db: str | None) -> None:
    """Check the integrity of the whole ledger and report every fault.

    The check covers the checksum of every row, the SHA-256 of sources and binaries, references between rows, the
    ranking, the states of runs, the Optuna study of each run, and missing tables, columns, indexes and views; with
    SQLite also the structure of the file and the queries of views. Other commands check only the rows they show, and
    the whole ledger if it is small.
    """
    from evoengine.cli.progress import LiveProgress
    from evoengine.ledger.check import find_faults, repair_ledger
    from evoengine.ledger.optuna.study import optuna_storage, repair_studies, study_faults
    from evoengine.ledger.store import open_unchecked

    with LiveProgress() as live, open_unchecked(db) as ledger:
        say_which(db)
        faults = find_faults(ledger, live.stage)
        if all(fault.repairable for fault in faults):
            live.stage("checking studies")
            storage = optuna_storage(ledger.url)  # after the check, because it creates missing tables of Optuna
            ledger.database.watch(storage.engine)
            faults += study_faults(storage, ledger)
            if repair and faults:
                live.stage("repairing")
                repair_ledger(ledger, live.say)
                repair_studies(storage, ledger)
        summary = f"{ledger.count():,} trials"
    for fault in faults:
        remedy = "" if not fault.repairable else " (repaired)" if repair else " (--repair rebuilds it)"
        display(f"{fault.what}{remedy}", soft_wrap=True)
    lost = [fault for fault in faults if not fault.repairable]
    if lost:
        raise MachineError("the ledger is damaged beyond repair; restore it from a copy (db backup)")
    if faults and not repair:
        raise NothingFound(f"the ledger needs a repair: {hint('db', 'check', '--repair', db=db)}")
    say(f"no fault found: {summary}" if not faults else f"repaired: {summary}")


@db.command()
@db_option
def upgrade(db: str | None) -> None:
    """Upgrade the ledger to the schema of this version, as every command that opens a ledger does.

    Older versions cannot open an upgraded ledger; db backup makes a copy first.
    """
    from evoengine.ledger.database import parse_url, schema_of
    from evoengine.ledger.schema import REVISIONS
    from evoengine.ledger.store import open_ledger

    before = schema_of(parse_url(chosen_database(db)))
    with open_ledger(db, create=False) as ledger:
        say_which(db)
        place = ledger.place
    newest = REVISIONS[-1]
    say(f"{place} has schema {newest}" if before == newest else f"{place}: from schema {before} to {newest}")


@db.command()
@click.argument("file", type=click.Path(path_type=Path))
@db_option
def backup(file: Path, db: str | None) -> None:
    """Copy the ledger to a new file. Searches may write to it meanwhile. The copy keeps its schema."""
    from evoengine.cli.progress import LiveProgress
    from evoengine.ledger.database import back_up

    say_which(db)
    with LiveProgress() as live:
        live.stage("copying")
        size = back_up(db, file)
    say(f"wrote {file}, {size:,} bytes")


@db.command()
@click.option(
    "--keep",
    type=click.IntRange(min=1),
    default=100,
    show_default=True,
    help="Number of best trials to keep per problem and GPU.",
)
@click.option(
    "--older-than",
    type=click.IntRange(min=0),
    metavar="DAYS",
    help="Prune only trials that ended more than DAYS days ago.",
)
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@db_option
def prune(keep: int, older_than: int | None, yes: bool, db: str | None) -> None:
    """Delete the sources and binaries of all but the best trials; they are most of a ledger's bytes.

    Configurations, verdicts, figures and lineage are kept, and so is everything of runs in progress. An SQLite file
    shrinks only if no other process has it open.
    """
    from evoengine.cli.history import agreed
    from evoengine.ledger.check import prune as prune_ledger
    from evoengine.ledger.database import vacuum

    before = datetime.now(UTC) - timedelta(days=older_than) if older_than is not None else None
    with reading(db) as ledger:
        if not (yes or agreed(f"Delete sources and binaries of all but the best {keep} trials in {ledger.place}?")):
            say("nothing was deleted")
            return
        pruned = prune_ledger(ledger, keep, before)
        smaller = vacuum(ledger.database.url, ledger.database.engine)
    say(f"deleted {pruned.sources:,} sources and {pruned.binaries:,} binaries, {pruned.packed_bytes:,} bytes")
    if not smaller:
        say("the file keeps its size because another process has it open; the free pages will be reused")


@db.command("rebuild-study")
@click.argument("run", type=click.IntRange(min=1))
@db_option
def rebuild_study(run: int, db: str | None) -> None:
    """Rebuild the Optuna study of a run from the ledger. Notes added in the dashboard are lost."""
    from evoengine.cli.progress import LiveProgress, say_missed
    from evoengine.ledger.optuna.study import optuna_storage, rebuild_studies

    with LiveProgress() as live, reading(db) as ledger:
        if ledger.find_run(run).status == RUNNING:
            raise UsageError(f"run {run} is in progress and writes its study itself; wait until it has ended")
        total = ledger.count(run=run)
        live.stage("writing the study")
        storage = optuna_storage(ledger.url)
        ledger.database.watch(storage.engine)
        for study in rebuild_studies(storage, ledger, run, lambda done: live.count(done, total)):
            say(f"rebuilt the study {study.name}")
            say_missed(study.missed, say, remedy="their values are outside the knobs' domains")
