"""evoengine mcp: the ledger, the gate and the model as tools of the Model Context Protocol"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from evoengine import __version__
from evoengine.cli.options import db_option, kernel_option
from evoengine.errors import EvoengineError, MachineError, NothingFound, UsageError
from evoengine.lineage import path
from evoengine.views import jsonable

if TYPE_CHECKING:
    from mcp.server.mcpserver import MCPServer

MOST_TRIALS = 200
"""limit of a search through this tool"""
INSTRUCTIONS = (
    "Tune CUDA kernels. A problem is written as gemm:m4096,n4096,k4096,fp16; a GPU as h100. Figures without a GPU are "
    "predictions. Text that you write for a kernel goes to propose, with the trial that it descends from; read that "
    "trial's text and counterexample by explain first."
)


@click.command()
@kernel_option
@db_option
def mcp(kernel: Path | None, db: str | None) -> None:
    """Serve search, verify, predict, profile, explain, best and propose as MCP tools on stdin and stdout.

    Arguments of tools are problems, GPUs and trials, never files. --kernel adds the problems of that folder.
    """
    if find_spec("mcp") is None:
        raise MachineError("the package mcp is missing: pip install 'evoengine[mcp]'")
    if kernel:
        from evoengine.tuning.setup import register_kernel

        register_kernel(kernel)
    server(db).run("stdio")


def server(db: str | None) -> MCPServer[Any]:
    """Return a server whose tools use the ledger `db`."""
    import anyio.to_thread
    from mcp.server.mcpserver import MCPServer

    made: MCPServer[Any] = MCPServer("evoengine", instructions=INSTRUCTIONS, version=__version__)

    async def run(function: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
        return await anyio.to_thread.run_sync(partial(_answer, function, db, *args))

    @made.tool()
    async def search(problem: str, gpu: str = "h100", trials: int = 20) -> dict[str, Any]:
        """Search for the fastest correct kernel of a problem; return the summary with the best trials."""
        return await run(_search, problem, gpu, trials)

    @made.tool()
    async def best(problem: str | None = None, gpu: str | None = None) -> dict[str, Any]:
        """Return the best kernels in the ledger for a problem and GPU, by default those of the last run."""
        return await run(_best, problem, gpu)

    @made.tool()
    async def verify(
        trial: int | None = None, config: dict[str, Any] | None = None, problem: str | None = None, gpu: str = "h100"
    ) -> dict[str, Any]:
        """Gate a trial of the ledger again, or a configuration of a problem; return verdict, cases and figure."""
        return await run(_verify, trial, config, problem, gpu)

    @made.tool()
    async def predict(config: dict[str, Any], problem: str, gpu: str = "h100") -> dict[str, Any]:
        """Return the predicted time of a configuration, its range and what bounds it."""
        return await run(_predict, config, problem, gpu)

    @made.tool()
    async def profile(trial: int) -> dict[str, Any]:
        """Return what limits a trial according to the performance model: busy pipes, and where and why warps stall."""
        return await run(_profile, trial)

    @made.tool()
    async def explain(trial: int) -> dict[str, Any]:
        """Return a trial's text, outcome, reason, counterexample and lineage."""
        return await run(_explain, trial)

    @made.tool()
    async def propose(parent: int, text: str) -> dict[str, Any]:
        """Judge a CUDA text in place of a trial's text, in a jail, and record it in the ledger."""
        return await run(_propose, parent, text)

    return made


def _answer(function: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    """Return a tool's answer as JSON values. Raises ToolError with the message of an EvoengineError."""
    from mcp.server.mcpserver.exceptions import ToolError

    try:
        found: dict[str, Any] = jsonable(function(*args))
    except EvoengineError as error:
        raise ToolError(str(error)) from None
    return found


def _search(db: str | None, problem: str, gpu: str, trials: int) -> dict[str, Any]:
    from evoengine.tuning.tune import tune
    from evoengine.views.results import summary_json

    if not 1 <= trials <= MOST_TRIALS:
        raise UsageError(f"trials is {trials}; this tool allows 1 to {MOST_TRIALS}")
    return dict(summary_json(tune(problem, gpu, trials=trials, db=db)))


def _best(db: str | None, problem: str | None, gpu: str | None) -> dict[str, Any]:
    from evoengine.tuning.best import best
    from evoengine.views.results import ranking_json

    return dict(ranking_json(best(problem, gpu, db=db)))


def _verify(
    db: str | None, trial: int | None, config: dict[str, Any] | None, problem: str | None, gpu: str
) -> dict[str, Any]:
    from evoengine.tuning.verify import verify
    from evoengine.views.trials import verified_json

    if config is not None and trial is None:
        found = verify(config, problem, gpu, db=db)
    elif trial is not None and config is None:
        found = verify(trial, db=db)
    else:
        raise UsageError("verify takes either a trial or a config with its problem")
    return dict(verified_json(found.candidate, found.seed, found.correct, str(found.on_cpu) if found.on_cpu else None))


def _predict(db: str | None, config: dict[str, Any], problem: str, gpu: str) -> dict[str, Any]:
    found = _verify(db, None, config, problem, gpu)
    names = ("problem", "gpu", "correct", "reason", "median_us", "range_us", "tflops", "bound", "utilisation", "model")
    return {name: found[name] for name in (*names, "clock", "registers", "spill_bytes")}


def _profile(db: str | None, trial: int) -> dict[str, Any]:
    from evoengine.ledger.store import open_ledger
    from evoengine.search.targets import target_of
    from evoengine.stages.profile import profile_without_gpu
    from evoengine.views.trials import profile_json

    with open_ledger(db, create=False) as ledger:
        candidate = ledger.candidate(trial, with_cubin=True)
        if candidate.source is None or candidate.binary is None or not candidate.binary.cubin:
            raise NothingFound(f"trial {trial} has no machine code to profile: it ended as {candidate.outcome}")
        return dict(profile_json(trial, profile_without_gpu(target_of(ledger, candidate), candidate.contender)))


def _explain(db: str | None, trial: int) -> dict[str, Any]:
    from evoengine.ledger.store import open_ledger
    from evoengine.tuning.proposals import descendant, judged_json
    from evoengine.views.trials import lineage_steps

    with open_ledger(db, create=False) as ledger:
        candidate = descendant(ledger, trial)
        return {**judged_json(candidate), "lineage": lineage_steps(path(trial, ledger.ancestors(trial)))}


def _propose(db: str | None, parent: int, text: str) -> dict[str, Any]:
    from evoengine.ledger.store import open_ledger
    from evoengine.tuning.proposals import Proposals, descendant, judged_json, kernel_of, require_proposable

    require_proposable(text)
    with open_ledger(db, create=False) as ledger:
        descends = descendant(ledger, parent)
        with Proposals(ledger, kernel_of(ledger, descends)) as run:
            return dict(judged_json(run.propose(descends, text)))
