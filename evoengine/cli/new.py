"""evoengine new"""

from __future__ import annotations

from pathlib import Path

import click

from evoengine.hints import hint


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--from", "source", metavar="KIND:FILE",
    help="Bring a kernel in: trace:DEFINITION.json[,WORKLOADS.jsonl], t1:FILE.json, kernel-tuner:SCRIPT.py or "
    "kernelbench:FILE.py.",
)  # fmt: skip
@click.option(
    "--reference", type=click.Path(path_type=Path), help="Python file with run(*inputs), where FILE has none."
)
@click.option("--entry", metavar="NAME", help="Which kernel of a kernel-tuner script that tunes several.")
def new(folder: Path, source: str | None, reference: Path | None, entry: str | None) -> None:
    """Write a folder with a kernel of your own, to edit and search: evoengine search --kernel FOLDER.

    Without --from it is a small kernel that works. What an imported file says and cannot be taken over is named.

    Scripts are run to be imported, and the kernel, its template and its reference when it is searched: take them from
    nobody you do not trust.
    """
    from evoengine.cli.display import say
    from evoengine.formats.folder import write_folder
    from evoengine.formats.importers import make_folder

    made = make_folder(folder.name, source, reference, entry)
    written = write_folder(made, folder)
    for remark in made.remarks:
        say(f"not taken over: {remark}")
    say(f"wrote {', '.join(path.name for path in written)} to {folder}")
    say(f"next: {hint('search', kernel=folder)}")
