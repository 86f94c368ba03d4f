"""evoengine gpus"""

from __future__ import annotations

import click

from evoengine.cli.options import json_option


@click.command()
@json_option
def gpus(as_json: bool) -> None:
    """List the supported GPUs with their limits and peaks, and the kernel families that fit them.

    Peaks are from data sheets: dense fp16 tensor operations with FP32 accumulation. For other boards, pass --gpu-file
    to search or verify: a TOML file with one table as in evoengine/gpus.toml.
    """
    from evoengine.cli.display import say, stdout
    from evoengine.cli.output import print_json
    from evoengine.views.boards import boards_json, gpus_remarks, gpus_table, known_boards

    known = known_boards()
    if as_json:
        print_json(boards_json(known))
        return
    stdout.print(gpus_table(known.gpus, known.fitting))
    for line in gpus_remarks(known):
        say(line)
