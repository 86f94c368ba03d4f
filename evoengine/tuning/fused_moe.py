"""Export a ledger's best matrix products on a GPU in the layout of vLLM's and SGLang's fused MoE kernel."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from evoengine.errors import NothingFound, UsageError
from evoengine.gpu import Gpu
from evoengine.hints import hint
from evoengine.ledger.store import Ledger, open_ledger
from evoengine.paths import write_atomically
from evoengine.workloads.gemm.fused_moe import FusedMoe, fused_moe_files
from evoengine.workloads.gemm.problem import GemmProblem, parse_problem

NAME = "gemm"


def find_fused_moe(ledger: Ledger, gpu: Gpu) -> FusedMoe:
    """Return the configurations in the layout. Raises NothingFound if the ledger has no gemm that fits it."""
    named = dict.fromkeys(run.problem for run in ledger.runs() if run.gpu == gpu.key)
    best = []
    for problem in map(_product, named):
        found = ledger.best(str(problem), gpu.key, top=1) if problem else []
        if problem and found:
            best.append((problem, found[0]))
    made = fused_moe_files(best, gpu)
    if not made.files:
        why = "; ".join(made.left_out) or "it has none"
        example = "gemm:m64,n8192,k4096,bf16"
        raise NothingFound(
            f"the ledger holds no product on {gpu.key} for a fused MoE kernel ({why}): "
            f"{hint('search', gpu=gpu.key, problem=example, db=ledger.db)} finds one"
        )
    return made


def write_fused_moe(folder: Path, gpu: Gpu, db: str | None = None) -> tuple[list[Path], Sequence[str]]:
    """Write the files and return them, with a sentence for each gemm that was left out.

    If a file exists with other contents, nothing is written. Raises NothingFound, and UsageError if a file is in the
    way or cannot be written.
    """
    with open_ledger(db, create=False) as ledger:
        made = find_fused_moe(ledger, gpu)
    texts = {folder / name: json.dumps(rows, indent=4) + "\n" for name, rows in made.files.items()}
    for path, text in texts.items():
        if path.exists() and not (path.is_file() and path.read_bytes() == text.encode()):
            raise UsageError(f"{path} exists with other contents; name a folder without it, or remove it first")
    for path, text in texts.items():
        write_atomically(path, [text])
    return list(texts), made.left_out


def _product(problem: str) -> GemmProblem | None:
    name, _, rest = problem.partition(":")
    return parse_problem(rest) if name == NAME else None
