"""Entry point: `evoengine COMMAND`. A command's module is imported when it is called, so that --help stays fast."""

from __future__ import annotations

import importlib
import io
import keyword
import os
import signal

import click

from evoengine import __version__
from evoengine.cli.options import CheckedGroup
from evoengine.cli.process import INTERRUPTED, prepare_streams, reader_exited, unwritten
from evoengine.errors import EvoengineError, MachineError
from evoengine.sandbox.machine import is_machine_fault, machine_error
from evoengine.text import one_line

COMMANDS = {
    "new": "Create a folder for a kernel of your own, or import one.",
    "problems": "List the built-in workloads with the syntax of their problems and an example of each.",
    "gpus": "List the supported GPUs with their limits and peaks, and the families that fit them.",
    "search": "Search for the fastest correct kernel of a problem on a GPU.",
    "run": "Run a Python script with Triton kernels on a virtual GPU.",
    "cubins": "List the kernels in a binary: a cubin, a fatbin, an object or a library.",
    "best": "Show the best kernels found, or export the best one.",
    "history": "List the trials in the ledger and their outcomes.",
    "runs": "List the runs in the ledger, or remove some.",
    "compare": "Compare two runs: settings, outcomes, best figures, common configurations.",
    "show": "Show one trial: outcome, configuration, resources, figure, gate cases and coverage.",
    "report": "Show which knob changes improved the time, and the lineage of the best kernel.",
    "measure": "Time candidates of a search without a GPU on a GPU, best estimate first.",
    "profile": "Show what limits one candidate, by Nsight Compute or by the performance model.",
    "accuracy": "Compare predicted with measured times.",
    "propose": "Judge texts that a program proposes for a kernel.",
    "mcp": "Serve search, verify, profile, propose and others as tools for an assistant (MCP).",
    "verify": "Gate one configuration, a Triton kernel, or a kernel of a binary.",
    "export": "Write a run to a T4 file, the common format of auto-tuners.",
    "import": "Import a run from a T4 file or a Kernel Tuner cache file.",
    "cluster": "Write the files of a Ray cluster, or inspect one.",
    "doctor": "Check what this machine has and what is missing, with remedies.",
    "dashboard": "Serve the trials in optuna-dashboard.",
    "claims": "Control which results later searches reuse.",
    "db": "Check, upgrade, back up or prune the ledger.",
    "serve": "Serve the ledger over HTTP and run the searches that clients submit.",
    "token": "Create, list and revoke tokens for the service.",
    "retune": "Queue a job for another GPU for each problem in the ledger.",
}
MODULES = {
    "problems": "machine", "gpus": "machine", "doctor": "machine", "cubins": "machine", "cluster": "machine",
    "runs": "history", "compare": "history", "claims": "history", "show": "history", "profile": "history",
    "report": "best", "measure": "accuracy", "propose": "search",
    "new": "transfer", "import": "transfer", "export": "transfer",
    "serve": "service", "token": "service", "retune": "service",
}  # fmt: skip # a table
"""command → its module in `evoengine.cli`, if that has another name"""


class Commands(CheckedGroup):
    """Commands by name, each imported when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        own = f"{name}_" if keyword.iskeyword(name) else name
        module = importlib.import_module(f"evoengine.cli.{MODULES.get(name, name)}")
        command: click.Command = getattr(module, own)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="evoengine")
def evoengine() -> None:
    """Find the fastest correct CUDA kernel for a GPU and a problem.

    Exit codes: 0 success, 1 nothing valid found, 2 invalid usage or configuration, 3 something on this machine is
    missing or failed, 130 interrupted.
    """


def main() -> int:
    """Run the command in sys.argv and return its exit code. An interrupted command ends the process."""
    prepare_streams()
    try:
        code = evoengine.main(standalone_mode=False)
    except (click.exceptions.Abort, KeyboardInterrupt):  # the latter on a second Ctrl-C while click reports the first
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # At exit the interpreter joins all threads, and those of workers whose shutdown was interrupted would wait
        # forever. The worker processes die with this one.
        unwritten()
        os._exit(INTERRUPTED)
    except click.ClickException as error:
        shown = io.StringIO()
        error.show(shown)
        # click quotes values of any length
        click.echo("\n".join(map(one_line, shown.getvalue().expandtabs().split("\n"))), err=True, nl=False)
        code = error.exit_code
    except EvoengineError as error:
        click.echo(f"evoengine: {error}", err=True)
        code = error.exit_code
    except OSError as error:
        if not is_machine_fault(error):
            raise
        click.echo(f"evoengine: {machine_error(error)}", err=True)
        code = MachineError.exit_code
    return checked_output(code if isinstance(code, int) else 0)


def checked_output(code: int) -> int:
    """Return the exit code after flushing all output, and report a failed write.

    A reader that exited early is not a failure.
    """
    lost = {name: failure for name, failure in unwritten().items() if not reader_exited(failure)}
    if "stdout" in lost:
        why = lost["stdout"].strerror
        click.echo(f"evoengine: the output could not be written to stdout: {why}", err=True)
    return code or (MachineError.exit_code if lost else 0)
