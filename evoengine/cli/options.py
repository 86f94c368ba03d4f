"""Options that several commands share, with their types, checks and shell completion."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.decorators import FC

from evoengine.errors import MachineError, UsageError, did_you_mean, require_word
from evoengine.gpu import known_gpus

RECORDED = "recorded:"
"""prefix of the device and the problem of a recorded space"""

if TYPE_CHECKING:
    from evoengine.ledger.store import Ledger
    from evoengine.service.client import Client

    TextType = click.ParamType[str]
    WordType = click.Choice[str]
else:
    TextType, WordType = click.ParamType, click.Choice  # which take type arguments only since Click 8.4


def complete_gpu(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return the GPUs that a shell may complete `--gpu` to."""
    return [name for name in known_gpus() if name.startswith(incomplete.lower())]


def complete_problem(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return the example problems that a shell may complete `--problem` to."""
    from evoengine.workloads import workloads

    named = ((name, workload.example) for name, workload in workloads().items())
    examples = [example if ":" in example else f"{name}:{example}" for name, example in named]
    return [example for example in examples if example.startswith(incomplete)]


def complete_kernel(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return the folders to which a shell may complete `--kernel`: kernels, and with a trailing slash other folders."""
    place = Path(incomplete)
    folder = place if incomplete.endswith("/") else place.parent
    try:
        inside = sorted(each for each in folder.iterdir() if each.is_dir() and not each.name.startswith("."))
    except OSError:
        return []
    found = [each for each in inside if str(each).startswith(str(place)) or incomplete in ("", "./")]
    return [str(each) if (each / "problem.json").is_file() else f"{each}/" for each in found]


class StoredGpuType(TextType):
    """A GPU in the ledger: a known one, or one that a file described or another tuner recorded."""

    name = "name"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return value.lower() if value.lower() in known_gpus() else value


class OneOf(WordType):
    """One of several words; the error suggests a similar one."""

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            require_word(value, self.choices)
        except UsageError as error:
            self.fail(str(error), param, ctx)
        return value


class StoredProblemType(TextType):
    """A problem, converted to the form in which the ledger stores it."""

    name = "problem"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from evoengine.workloads import stored_problem

        return stored_problem(value)


class CheckedGroup(click.Group):
    """A group that refuses arguments that click would accept silently."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command and its arguments.

        Raises click.UsageError for an unknown command or unusable arguments.
        """
        known = self.list_commands(ctx)
        if args[0] not in known and not args[0].startswith("-"):
            near = did_you_mean(args[0], known)
            raise click.UsageError(
                f"there is no command {args[0]!r}{near or f'; {ctx.command_path} --help lists them'}", ctx
            )
        name, command, rest = super().resolve_command(ctx, args)
        if command is not None and not ctx.resilient_parsing:
            check_given(ctx, command, name, rest)
        return name, command, rest


def check_given(group: click.Context, command: click.Command, name: str | None, arguments: Sequence[str]) -> None:
    """Check the arguments of a command more strictly than click does.

    Raises click.UsageError if an option that takes one value is repeated (click would use the last one), if an option
    lacks its value (click would use the next option as the value), or if a value is unusable by any command: empty, not
    text, or too long for a file name.
    """
    ctx = click.Context(command, info_name=name, parent=group, **command.context_settings)
    options = [p for p in command.params if isinstance(p, click.Option)]
    single = [p for p in options if not (p.multiple or p.is_flag or p.count)]
    for option in single:
        option.multiple = True
    try:
        given, _, _ = command.make_parser(ctx).parse_args(list(arguments))
    finally:
        for option in single:
            option.multiple = False
    for option in single:
        values = given.get(option.name, ())
        if len(values) > 1:
            # an option with an optional value may have none
            listed = " and ".join(value for value in values if isinstance(value, str))
            twice = f"{len(values)} times{f', {listed}' if listed else ''}"
            raise click.UsageError(f"{option.opts[0]} is given {twice}; it takes one value", ctx)
    names = {name for option in command.get_params(ctx) for name in option.opts if name.startswith("--")}
    for param in command.params:
        if param.type is click.UNPROCESSED:  # the arguments of another program
            continue
        found = given.get(param.name)
        for value in [found] if isinstance(found, str) else found if isinstance(found, Sequence) else ():
            if isinstance(value, str) and value.partition("=")[0] in names and isinstance(param, click.Option):
                missing = param.metavar or "value"
                raise click.UsageError(f"{param.opts[0]} has no {missing}: the option {value} follows it", ctx)
            if isinstance(value, str) and (wrong := _why_unusable(value, param)):
                raise click.UsageError(f"{param.get_error_hint(ctx)}: {wrong}", ctx)


def _why_unusable(value: str, param: click.Parameter) -> str | None:
    if not value:
        return "the value is empty; give one, or leave it out"
    if isinstance(param.type, click.Path):
        try:
            os.lstat(value)
        except OSError as error:
            return f"{value!r} is too long for a file name" if error.errno == errno.ENAMETOOLONG else None
        return None
    try:
        value.encode()
    except UnicodeEncodeError:
        return f"{value!r} holds bytes that are not text in this locale"
    return None


def gpu_option(default: str | None) -> Callable[[FC], FC]:
    """Return the option --gpu: with a default, the target GPU; without one, a filter on the ledger's GPUs."""
    if default is None:
        return click.option(
            "--gpu", type=StoredGpuType(), shell_complete=complete_gpu, help="Restrict the output to this target GPU."
        )
    said = "Target GPU, as listed by evoengine gpus. auto selects the GPU of this machine, or h100 if it has none."
    return click.option(
        "--gpu", metavar="NAME", default=default, show_default=True, shell_complete=complete_gpu, help=said
    )


gpus_option = click.option(
    "--gpu",
    "gpus",
    metavar="NAME",
    multiple=True,
    shell_complete=complete_gpu,
    help="Target GPU, as listed by evoengine gpus. auto selects the GPU of this machine or cluster, or h100 if it has "
    "none. With --cluster the option can be repeated; one search runs for each kind of GPU.  [default: auto]",
)


def cluster_option(default: str | None) -> Callable[[FC], FC]:
    """Return the option --cluster. Without a default, commands run on this machine unless it is given."""
    return click.option(
        "--cluster",
        metavar="ADDRESS",
        default=default,
        show_default=default is not None,
        help="Ray cluster: local (this machine), auto (the cluster of which this machine is a node), ray://HOST:10001, "
        "or, on a node, HOST:6379. See docs/fleet.md.",
    )


gpu_file_option = click.option(
    "--gpu-file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="TOML file that describes a GPU not listed by evoengine gpus.",
)
problem_option = click.option(
    "--problem",
    metavar="WORKLOAD:SIZES",
    shell_complete=complete_problem,
    help="Problem to tune for; evoengine problems describes the syntax.  [default: the workload's example]",
)
problems_option = click.option(
    "--problem",
    "problems",
    metavar="WORKLOAD:SIZES",
    multiple=True,
    shell_complete=complete_problem,
    help="Problem to tune for; evoengine problems describes the syntax. Can be repeated, and can be a named set "
    "(gemm:llama3-8b) or @FILE with a problem on each line: one search then finds the kernels for all of them.  "
    "[default: the workload's example]",
)
stored_problems_option = click.option(
    "--problem",
    "problems",
    metavar="WORKLOAD:SIZES",
    multiple=True,
    shell_complete=complete_problem,
    help="Restrict the output to this problem. For several problems, a named set or @FILE, the output is the table of "
    "the kernels that serve them.",
)
kernels_option = click.option(
    "--kernels",
    type=click.IntRange(min=1),
    metavar="K",
    help="With several problems: maximum number of kernels that serve them.  [default: the best of each problem]",
)
stored_problem_option = click.option(
    "--problem", type=StoredProblemType(), shell_complete=complete_problem, help="Restrict the output to this problem."
)
kernel_option = click.option(
    "--kernel",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    shell_complete=complete_kernel,
    help="Folder of a kernel of your own, as created by evoengine new. Its kernel, template and reference are "
    "executed: use only folders that you trust.",
)
triton_option = click.option(
    "--triton",
    metavar="FILE::KERNEL",
    help="Triton kernel of your own; its autotuner's list is the space (docs/virtual-gpu.md). FILE is executed: use "
    "only files that you trust.",
)
call_option = click.option(
    "--call",
    metavar="FUNCTION",
    help="With --triton: function of FILE that launches the kernel on tensors of its own. Its integer parameters are "
    "sizes, with defaults. For vLLM's and SGLang's kernels: the data type, bf16, fp8_w8a8 or fp8_w8a8_block.",
)
reference_option = click.option(
    "--reference",
    metavar="FUNCTION",
    help="With --triton: function of FILE that takes parameters of the kernel by their names and returns what the "
    "kernel writes. With verify --cubin: FILE.py::FUNCTION, which takes tensors of launch.json by their names.",
)
db_option = click.option(
    "--db",
    metavar="URL",
    help="Ledger: a file or an SQLAlchemy URL. Pass a URL that contains a password in EVOENGINE_DB, or in the file "
    "named by EVOENGINE_DB_FILE.  [default: db/evoengine.db in the current folder]",
)
log_json_option = click.option(
    "--log-json", is_flag=True, help="Write events to stderr as JSON, one object per line (docs/searching.md)."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout.")
space_option = click.option(
    "--space", type=click.Path(path_type=Path), help="Search-space file.  [default: that of the workload]"
)
templates_option = click.option(
    "--templates",
    type=click.Path(path_type=Path),
    help="Folder of kernel templates. Templates execute code: use only those that you trust.  "
    "[default: those of evoengine]",
)


# ── the ledger that --db names ──────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def reading(db: str | None) -> Iterator[Ledger]:
    """Open an existing ledger. Raises NothingFound if there is none."""
    from evoengine.ledger.store import open_ledger

    with open_ledger(db, create=False) as ledger:
        say_which(db)
        yield ledger


def say_which(db: str | None) -> None:
    """Print which ledger a command used if --db was not given."""
    if db is None:
        from evoengine.cli.output import say
        from evoengine.ledger.database import display_url, parse_url
        from evoengine.paths import chosen_database

        say(f"ledger {display_url(parse_url(chosen_database(None)))}")


# ── the service that --server names ─────────────────────────────────────────────────────────────────────────────────

server_option = click.option(
    "--server",
    metavar="URL",
    help="Send the request to this service (evoengine serve). EVOENGINE_TOKEN, or the file named by "
    "EVOENGINE_TOKEN_FILE, holds the token.",
)


def connect(url: str) -> Client:
    """Return a client of the service.

    Raises UsageError for an invalid URL, and MachineError if a package is missing.
    """
    try:
        from evoengine.service.client import Client
    except ModuleNotFoundError as error:
        raise MachineError(f"--server needs {error.name}: pip install evoengine[client]") from error
    return Client(url)


def refuse_beside(server: str, **options: object) -> None:
    """Raise UsageError for options that apply only to this machine."""
    for name, value in options.items():
        if value not in (None, False, ()):
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"{flag} applies to this machine, and --server {server} to another; leave one of them out")
