"""evoengine new"""

from __future__ import annotations

from pathlib import Path

import click

from evoengine.hints import hint


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--from", "source", metavar="KIND:FILE",
    help="Import a kernel: trace:DEFINITION.json[,WORKLOADS.jsonl], t1:FILE.json, kernel-tuner:SCRIPT.py or "
    "kernelbench:FILE.py.",
)  # fmt: skip
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
    from evoengine.cli.display import say
    from evoengine.formats.folder import write_folder
    from evoengine.formats.importers import make_folder

    made = make_folder(folder.name, source, reference, entry)
    written = write_folder(made, folder)
    for remark in made.remarks:
        say(f"not taken over: {remark}")
    say(f"wrote {', '.join(path.name for path in written)} to {folder}")
    say(f"next: {hint('search', kernel=folder)}")
