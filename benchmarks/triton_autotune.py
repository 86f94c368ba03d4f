"""Compare the configuration that a predicted autotuner picks with the one that a GPU picks, over Triton's tutorials.

    python benchmarks/triton_autotune.py TUTORIALS MEASURED                  on a GPU: Triton times its own lists
    evoengine run --gpu h100 --sample --map-cuda benchmarks/triton_autotune.py TUTORIALS PREDICTED
    python benchmarks/triton_autotune.py --compare MEASURED PREDICTED        anywhere; results/ has both

TUTORIALS is the folder python/tutorials of a checkout of Triton. Each tutorial is imported up to its host function,
which is called once per problem; `configs_timings` of its autotuner then has a time of each configuration, measured or
predicted by what the driver's benchmarker answers. What the file has already is not timed again.
"""

from __future__ import annotations

import argparse
import ast
import gzip
import importlib.util
import json
import statistics
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

Timings = dict[str, float]
"""µs of each configuration, by its text"""


def tutorial(folder: Path, name: str, last: str) -> ModuleType:
    """Import a tutorial up to the definition or assignment of `last`, without what it runs behind."""
    path = next(folder.glob(f"{name}-*.py"))
    text = path.read_text("utf-8")
    end = next(node.end_lineno for node in ast.parse(text).body if last in defined(node))
    copy = Path(tempfile.mkdtemp()) / f"tutorial_{name}.py"
    copy.write_text("".join(text.splitlines(keepends=True)[:end]), "utf-8")
    spec = importlib.util.spec_from_file_location(copy.stem, copy)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[copy.stem] = module
    spec.loader.exec_module(module)
    return module


def defined(node: ast.stmt) -> list[str]:
    """Return the names that a top-level statement defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def cases(folder: Path) -> Iterator[tuple[str, str, Callable[[], Any]]]:
    """Yield kernel, problem, and a call that returns the kernel's autotuner after a launch."""
    import torch

    def drawn(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.float16).to(dtype)

    products = tutorial(folder, "03", "matmul")
    for size in (512, 1024, 2048, 4096):
        yield (
            "03 matmul_kernel", f"m{size} n{size} k{size} fp16",
            lambda n=size: (products.matmul(drawn(n, n), drawn(n, n)), products.matmul_kernel)[1],
        )  # fmt: skip
    attention = tutorial(folder, "06", "attention")
    for length, width, causal in (
        (1024, 64, False),
        (4096, 64, False),
        (4096, 64, True),
        (4096, 128, False),
        (4096, 128, True),
    ):
        yield (
            "06 _attn_fwd", f"b4 h32 s{length} d{width} {'causal' if causal else 'full'} fp16",
            lambda s=length, d=width, c=causal: (
                attention.attention(drawn(4, 32, s, d), drawn(4, 32, s, d), drawn(4, 32, s, d), c, 0.5, False),
                attention._attn_fwd,
            )[1],
        )  # fmt: skip
    grouped = tutorial(folder, "08", "group_gemm_tma_fn")
    for size in (512, 2048):
        yield (
            "08 grouped_matmul_kernel", f"4 of m{size} n{size} k{size} fp16",
            lambda n=size: (
                grouped.group_gemm_fn([drawn(n, n) for _ in range(4)], [drawn(n, n) for _ in range(4)]),
                grouped.grouped_matmul_kernel,
            )[1],
        )  # fmt: skip
    persistent = tutorial(folder, "09", "matmul_descriptor_persistent")
    for depth in (512, 4096):
        problem = f"m4096 n4096 k{depth} fp16"
        yield (
            "09 matmul_kernel", problem,
            lambda k=depth: (persistent.matmul(drawn(4096, k), drawn(4096, k).T), persistent.matmul_kernel)[1],
        )  # fmt: skip
        yield (
            "09 matmul_kernel_tma", problem,
            lambda k=depth: (
                persistent.matmul_tma(drawn(4096, k), drawn(4096, k), False),
                persistent.matmul_kernel_tma,
            )[1],
        )  # fmt: skip
        yield (
            "09 matmul_kernel_tma_persistent", problem,
            lambda k=depth: (
                persistent.matmul_tma_persistent(drawn(4096, k), drawn(4096, k), False),
                persistent.matmul_kernel_tma_persistent,
            )[1],
        )  # fmt: skip


def timings(tuner: Any) -> Timings:
    """Return µs of each configuration that the autotuner of a kernel timed last; drop those that failed."""
    found = {}
    for config, given in tuner.configs_timings.items():
        milliseconds = given[0] if isinstance(given, Sequence) else given
        if milliseconds < float("inf"):
            found[str(config).replace("pre_hook: None", "").strip(", ")] = 1000.0 * milliseconds
    return found


def record(folder: Path, out: Path) -> None:
    """Add what the autotuners time to `out`, after each problem, with the reason where one fails."""
    rows: list[dict[str, Any]] = json.loads(out.read_text("utf-8")) if out.exists() else []
    known = {(row["kernel"], row["problem"]) for row in rows}
    for kernel, problem, call in cases(folder):
        if (kernel, problem) in known:
            continue
        row: dict[str, Any] = {"kernel": kernel, "problem": problem}
        try:
            tuner = call()
            tuner.cache.clear()
            row["us"] = timings(tuner)
        except Exception:
            row["error"] = traceback.format_exc(limit=3)
        rows.append(row)
        out.write_text(json.dumps(rows, indent=1), "utf-8")
        print(kernel, problem, len(row.get("us", ())), row.get("error", "").splitlines()[-1:], flush=True)


def compare(measured: Sequence[Mapping[str, Any]], predicted: Sequence[Mapping[str, Any]]) -> None:
    """Print, per problem, how long the predicted first takes beside the measured best, and errors over the list."""
    by_place = {(row["kernel"], row["problem"]): row.get("us", {}) for row in predicted}
    picks, errors = [], []
    print("| kernel | problem | configurations | measured best, µs | predicted first | mean error | signed |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for row in measured:
        other = by_place.get((row["kernel"], row["problem"]), {})
        both = {config: (us, other[config]) for config, us in row.get("us", {}).items() if config in other}
        if not both:
            continue
        best = min(us for us, _ in both.values())
        first = min(both.values(), key=lambda pair: pair[1])[0] / best
        off = [guess / us - 1.0 for us, guess in both.values()]
        picks.append(first)
        errors += off
        print(
            f"| {row['kernel']} | {row['problem']} | {len(both)} | {best:.1f} | {first:.2f} | "
            f"{statistics.fmean(map(abs, off)):.1%} | {statistics.fmean(off):+.1%} |"
        )
    mean, signed = statistics.fmean(map(abs, errors)), statistics.fmean(errors)
    print(
        f"{len(picks)} problems: the predicted first takes {statistics.geometric_mean(picks):.3f} of the measured best,"
    )
    print(f"at worst {max(picks):.2f}; {len(errors)} configurations: mean error {mean:.1%}, signed {signed:+.1%}")


def read(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file that `record` wrote, or of one that was compressed since."""
    data = path.read_bytes()
    rows: list[dict[str, Any]] = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    return rows


def main() -> None:
    """Record or compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("tutorials", type=Path, nargs="?")
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("MEASURED", "PREDICTED"))
    given = parser.parse_args()
    if given.compare:
        compare(*map(read, given.compare))
    elif given.tutorials and given.out:
        record(given.tutorials, given.out)
    else:
        parser.error("give TUTORIALS and FILE, or --compare MEASURED PREDICTED")


if __name__ == "__main__":
    main()
