"""evoengine doctor"""

from __future__ import annotations

import click

from evoengine.cli.options import json_option


@click.command()
@json_option
def doctor(as_json: bool) -> int:
    """Check what this machine has and what is missing, with remedies. The exit code is 3 if a search cannot run."""
    from evoengine.cli.display import say, stdout
    from evoengine.cli.output import print_json
    from evoengine.errors import MachineError
    from evoengine.tuning.doctor import check_machine
    from evoengine.views.boards import findings_json, findings_table

    found = check_machine()
    able = all(f.here for f in found if f.needed)
    if as_json:
        print_json(findings_json(able, found))
    else:
        stdout.print(findings_table(found))
        times = all(f.here for f in found if f.name in ("GPU", "CUDA versions"))
        how = "times candidates on the GPU" if times else "gates on the CPU and ranks by estimate"
        say(f"a search here {how}" if able else "a search cannot run here until the marked items are fixed")
    return 0 if able else MachineError.exit_code
