"""Options that several commands share, and how their texts become records."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

from evoengine.gpu import Gpu, find_gpu
from evoengine.problem import EXAMPLE, Problem, parse_problem

RECORDED = "recorded:"
"""begins the device and the problem of a recorded space"""


class GpuType(click.ParamType):
    name = "name"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> Gpu:
        return find_gpu(value) if isinstance(value, str) else value


class ProblemType(click.ParamType):
    name = "problem"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> Problem:
        return parse_problem(value) if isinstance(value, str) else value


class StoredProblemType(click.ParamType):
    """A problem that the ledger may hold: also a recorded space's, `recorded:NAME`, which stays a text."""

    name = "problem"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> Problem | str:
        return value if value.startswith(RECORDED) else parse_problem(value)


def gpu_option(default: str | None) -> Callable:
    return click.option("--gpu", type=GpuType(), default=default, show_default=bool(default), help="GPU to tune for.")


def problem_option(default: str | None = EXAMPLE) -> Callable:
    text = "What to compute: b…,h…,s…,d…,fp16|bf16[,causal][,kv…]; sq…,sk… for unlike lengths."
    kind = ProblemType() if default else StoredProblemType()
    return click.option("--problem", type=kind, default=default, show_default=bool(default), help=text)


db_option = click.option("--db", metavar="URL", help="Ledger: a file or an SQLAlchemy URL.  [default: db/evoengine.db]")
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout.")
space_option = click.option(
    "--space", type=click.Path(path_type=Path), help="Search-space file.  [default: the one for attention]"
)
templates_option = click.option(
    "--templates", type=click.Path(path_type=Path), help="Folder of kernel templates.  [default: those of evoengine]"
)
