"""Options that several commands share, and how their texts become records."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.decorators import FC

from evoengine.gpu import find_gpu

RECORDED = "recorded:"
"""begins the device and the problem of a recorded space"""

if TYPE_CHECKING:
    TextType = click.ParamType[str]
else:
    TextType = click.ParamType  # which takes type arguments only since Click 8.4


class GpuType(TextType):
    """The name of a known GPU."""

    name = "name"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return find_gpu(value).key


class StoredProblemType(TextType):
    """A problem that the ledger may hold, in the form it has there. A recorded space's, or that of a kernel which
    somebody brought, is taken as it is."""

    name = "problem"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from evoengine.workloads import parse_problem, workloads

        name, colon, _ = value.partition(":")
        return str(parse_problem(value)[1]) if not colon or name in workloads() else value


def gpu_option(default: str | None) -> Callable[[FC], FC]:
    said = "GPU to tune for." if default else "Only what was tuned for this GPU."
    return click.option("--gpu", type=GpuType(), default=default, show_default=bool(default), help=said)


problem_option = click.option(
    "--problem", metavar="WORKLOAD:SIZES", help="What to compute; evoengine problems lists them.  [default: an example]"
)
stored_problem_option = click.option(
    "--problem", type=StoredProblemType(), help="Only this one of the ledger's problems."
)
kernel_option = click.option(
    "--kernel", type=click.Path(path_type=Path), metavar="FOLDER", help="A kernel of your own (evoengine new)."
)
db_option = click.option(
    "--db", metavar="URL",
    help="Ledger: a file or an SQLAlchemy URL; one with a password belongs into EVOENGINE_DB, or into a file that "
    "EVOENGINE_DB_FILE names.  [default: db/evoengine.db]",
)  # fmt: skip
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout.")
space_option = click.option(
    "--space", type=click.Path(path_type=Path), help="Search-space file.  [default: the workload's own]"
)
templates_option = click.option(
    "--templates", type=click.Path(path_type=Path), help="Folder of kernel templates.  [default: those of evoengine]"
)
