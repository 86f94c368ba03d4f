"""evoengine new, import and export: import kernels and runs from files, and export runs"""

from __future__ import annotations

import json
import os
import socket
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from evoengine import __version__
from evoengine.cli.options import OneOf, db_option, reading
from evoengine.cli.output import say
from evoengine.errors import UsageError, hint
from evoengine.gpu_file import stored_fields
from evoengine.paths import write_atomically
from evoengine.records import Device, Kind, Run
from evoengine.text import command_line, printable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from evoengine.ledger.store import Ledger
    from evoengine.ledger.transfer import RunHistory
    from evoengine.records import Kind, Value

    Found = tuple[RunHistory, Kind, Mapping[str, Sequence[Value]], int]
    """a run, the kind of figure to show, the knobs' domains, how many trials"""


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--from",
    "source",
    metavar="KIND:FILE",
    help="Import a kernel: trace:DEFINITION.json[,WORKLOADS.jsonl], t1:FILE.json, kernel-tuner:SCRIPT.py or "
    "kernelbench:FILE.py.",
)
@click.option(
    "--reference",
    type=click.Path(path_type=Path),
    help="Python file that defines run(*inputs), if FILE has no reference.",
)
@click.option("--entry", metavar="NAME", help="Kernel to import from a kernel-tuner script that tunes several.")
def new(folder: Path, source: str | None, reference: Path | None, entry: str | None) -> None:
    """Create a folder for a kernel of your own, to edit and then search with evoengine search --kernel FOLDER.

    Without --from the folder holds a small working kernel. With --from, parts of the imported file that have no
    equivalent are listed.

    Importing a script executes it, and a search executes the kernel, its template and its reference: use only files
    that you trust.
    """
    from evoengine.formats.folder import write_folder
    from evoengine.formats.importers import make_folder

    made = make_folder(folder.name, source, reference, entry)
    written = write_folder(made, folder)
    for remark in made.remarks:
        say(f"not imported: {remark}")
    say(f"wrote {', '.join(path.name for path in written)} to {folder}")
    say(f"next: {hint('search', kernel=folder)}")


@click.command("import")
@click.argument("file", type=click.Path(path_type=Path))
@db_option
def import_(file: Path, db: str | None) -> None:
    """Import a run from a T4 file or a Kernel Tuner cache file into the ledger."""
    from evoengine.cli.progress import LiveProgress, say_missed
    from evoengine.ledger.optuna.study import optuna_storage, rebuild
    from evoengine.ledger.store import open_ledger
    from evoengine.ledger.transfer import import_run

    with LiveProgress() as live:
        live.stage("reading the file")
        whole, kind, domains, count = _own(file) or _recorded(file, live.say)
        whole = replace(whole, run=replace(whole.run, imported_from=printable(file.name)))
        with open_ledger(db, create=True) as ledger:
            live.stage("writing the ledger")
            storage = optuna_storage(ledger.url)
            run, trials = import_run(ledger, _marked(whole, ledger), lambda done: live.count(done, count))
            numbers = f"run {run}, trials {trials[0]} to {trials[-1]}"
            live.say(f"imported {len(trials)} trials from {file} into {ledger.place} as {numbers}")
            live.say("writing their study for the dashboard; the import is complete, even after Ctrl-C")
            live.stage("writing the study")
            study = rebuild(storage, ledger, run, kind, domains, lambda done: live.count(done, count))
            say_missed(study.missed, live.say, remedy=hint("db", "rebuild-study", run, db=db))


def _marked(whole: RunHistory, ledger: Ledger) -> RunHistory:
    """Return the run with figures marked as suspect that exceed the GPU's limits, if problem and GPU are known.

    Raises UsageError if the ledger has a different GPU under the name of the one that the file describes.
    """
    from evoengine.publish.imported import mark_suspect
    from evoengine.search.targets import stored_gpu, stored_target
    from evoengine.tuning.boards import require_same_board

    run, board = whole.run, None
    if run.gpu_definition:
        board = stored_fields(run.gpu_definition, "the file's description of its GPU")
        require_same_board(ledger, board)
    try:
        gpu = board or stored_gpu(ledger, run.gpu)
        return mark_suspect(whole, stored_target(ledger, run.problem, gpu))
    except UsageError:  # the number of operations of another tuner's problem is unknown
        return whole


def _own(file: Path) -> Found | None:
    """Read a run that evoengine exported; return None for a file of another tuner."""
    from evoengine.ledger.rows import most_trusted_kind
    from evoengine.publish.t4 import from_t4
    from evoengine.search.recorded import load, occurring

    try:
        whole = from_t4(load(file))
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        wrong = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise UsageError(
            f"{file} was written by evoengine, but a part is missing or wrong ({printable(wrong, 300)}); "
            "export the run again"
        ) from error
    if whole is None:
        return None
    kind = most_trusted_kind(figure for each in whole.candidates for figure in each.figures)
    configs = [each.candidate.config for each in whole.candidates]
    return whole, kind, occurring(configs), len(configs)


def _recorded(file: Path, echo: Callable[[str], None]) -> Found:
    """Read a run that another tuner recorded."""
    from evoengine.ledger.transfer import CandidateHistory, RunHistory
    from evoengine.search.recorded import REPLAY_OBJECTIVE, device_of, entries, problem_of, read_recorded
    from evoengine.tuning.recorded import echo_oddities

    space, now = read_recorded(file), datetime.now(UTC)
    echo_oddities(space, echo)
    run = Run(
        id=0,
        started_at=now,
        finished_at=now,
        status=f"imported from {printable(file.name)}",
        gpu=device_of(space),
        problem=problem_of(space),
        device=Device(device_of(space)),
        space_name=printable(file.name),
        space_sha256="",
        space_text="",
        sampler="imported",
        objectives=REPLAY_OBJECTIVE.name,
        seed=0,
        version=__version__,
        host=socket.gethostname(),
        pid=os.getpid(),
        command=command_line(),
    )
    found = (CandidateHistory(c, figures=[c.measurement] if c.measurement else ()) for c in entries(space, run=0))
    return RunHistory(run, (), found), Kind.RECORDED, {knob.name: knob.values for knob in space.knobs}, len(space)


@click.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--format", "kind", type=OneOf(["t4"]), default="t4", show_default=True, help="t4: FAIR T4 results.")
@click.option("--run", type=click.IntRange(min=1), help="Run to write.  [default: the last]")
@db_option
def export(file: Path, kind: str, run: int | None, db: str | None) -> None:
    """Write a run to a T4 file, the common format of auto-tuners, for other tools or another ledger."""
    from evoengine.ledger.transfer import read_run
    from evoengine.publish.t4 import to_t4

    with reading(db) as ledger:
        if file.resolve() == Path(ledger.place).resolve():
            raise UsageError(f"{file} is the ledger itself; name another file for the run, and the ledger with --db")
        number = ledger.find_run(run).id
        data = to_t4(read_run(ledger, number))
    write_atomically(file, [json.dumps(data, allow_nan=False), "\n"])
    say(f"wrote run {number}, {len(data['results'])} trials, to {file}")
