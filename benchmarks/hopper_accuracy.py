"""The model held against times that others measured on an H100: FlashAttention-3 and fast.cu's GEMM kernels.

    python benchmarks/hopper_accuracy.py --data DIR --cubins DIR [--json OUT]

--data holds fa3_flashgpusim_1500mhz.csv (Nsight Compute, cold L2, 1500 MHz) and fast_cu/ with measured.csv beside the
kernels' texts (no clock locked); --cubins holds FlashAttention-3's machine code (benchmarks/flash_attention_3.py). A
row whose kernel is public neither as text nor as machine code is listed and not counted.

Sets: `fa3` and `fast_cu`, on which no constant is fitted. The binary of D128 without a mask is not quite the one that
was measured, which ran clusters of two blocks; its rows say so.

JSON: a list of {"set", "kernel", "problem", "clock", "measured_us", "predicted_us"}, with the class of the kernel and
what bounds it. Exit code 1 where a row that has text or machine code could not be predicted; it is named.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rich.console import Console  # noqa: E402
from rich.markdown import Markdown  # noqa: E402

from benchmarks import fast_cu  # noqa: E402
from benchmarks import flash_attention_3 as fa3  # noqa: E402
from evoengine.accuracy.page import Row, page  # noqa: E402
from evoengine.devices.base import KernelFailure  # noqa: E402
from evoengine.errors import EvoengineError, UsageError  # noqa: E402
from evoengine.sass.chip import (  # noqa: E402
    BOOST,
    Clock,
    find_chip,
)
from evoengine.sass.predict import Prediction, Unpredictable, predict  # noqa: E402
from evoengine.stages.compile import CompileFailed  # noqa: E402

CHIP = "h100"
FA3_ROWS = "fa3_flashgpusim_1500mhz.csv"
FA3_KINDS = {
    ("64", "0"): "d64_192x192",
    ("64", "1"): "d64_causal_192x128",
    ("128", "0"): "d128_128x176",
    ("128", "1"): "d128_causal_128x128",
}
"""head dimension and mask → machine code with the tile that ran"""
MEASURED_OTHERWISE = {"d128_128x176": ", measured in clusters of 2"}
"""machine code → in what the one that was measured differs"""
UNLOCKED = Clock(BOOST)
"""of few launches behind one another: an H100 of this project takes fast.cu's published times alone (K10 187 µs, 181
published), and 15 % more without a pause"""
FAILURES = (EvoengineError, CompileFailed, KernelFailure, Unpredictable)


class Missed(Exception):
    """A row that has text or machine code and could not be predicted."""


def row_of(name: str, kernel: str, problem: str, measured_us: float, p: Prediction) -> Row:
    return Row(name, kernel, problem, CHIP, str(p.clock), measured_us, p.time_us, p.kernel_class, p.bound)


def read_csv(path: Path) -> list[dict[str, str]]:
    try:
        with path.open(newline="") as file:
            return list(csv.DictReader(file))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None


# ── FlashAttention-3 ────────────────────────────────────────────────────────────────────────────────────────────────


def fa3_rows(data: Path, cubins: Path) -> Iterator[Row | Missed]:
    chip = find_chip(CHIP)
    for given in read_csv(data / FA3_ROWS):
        kind = FA3_KINDS[given["D"], given["causal"]]
        batch, heads, seqlen, dim = (int(given[name]) for name in "BHSD")
        problem = fa3.Problem(batch, heads, seqlen, dim, given["causal"] == "1")
        named = f"b{batch},h{heads},s{seqlen},d{dim},fp16" + ",causal" * problem.causal
        try:
            predicted = fa3.predict_launch(cubins, kind, problem, chip, Clock("locked", int(given["clock_mhz"])))
            kernel = f"{kind} ({given['profile']}{MEASURED_OTHERWISE.get(kind, '')})"
            yield row_of("fa3", kernel, named, float(given["ncu_us"]), predicted)
        except (*FAILURES, OSError) as error:
            yield Missed(f"fa3 {kind}, {named}: {error}")


# ── fast.cu ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def fast_cu_rows(data: Path) -> Iterator[Row | Missed | str]:
    """Yield a row for each kernel whose text the folder has, and a sentence for each other."""
    folder, seen = data / "fast_cu", dict[tuple[int, int], float]()
    for given in read_csv(folder / "measured.csv"):
        named, problem = f"{given['kernel']}, {given['problem'].split(' (')[0]}", given["problem"]
        number, size = fast_cu.number_of(given["source_file"]), re.match(r"(\d+)\^3", problem)
        file = folder / f"matmul_{number}.cuh"
        if number is None or size is None or not file.is_file():
            yield f"fast_cu {named}: {given['us']} µs, no text"
            continue
        pair = number, int(size[1])
        if pair in seen:
            yield f"fast_cu {named}: {given['us']} µs, measured before in {seen[pair]} µs, which counts"
            continue
        seen[pair] = float(given["us"])
        try:
            program, launch = fast_cu.launch(file, *pair)
            work = 2.0 * pair[1] ** 3, 6.0 * pair[1] ** 2
            predicted = predict(program, launch, find_chip(CHIP), *work, clock_of(given["clock_note"]), cold=False)
            yield row_of("fast_cu", f"K{number}", f"{pair[1]}^3", seen[pair], predicted)
        except FAILURES as error:
            yield Missed(f"fast_cu {named}: {error}")


def clock_of(note: str) -> Clock:
    """Return the clock that a note states; UNLOCKED where it states none."""
    locked = re.search(r"locked\D*(\d{3,4})(?: ?MHz)?", note) if "not locked" not in note else None
    return Clock("locked", int(locked[1])) if locked else UNLOCKED


# ── all of them ─────────────────────────────────────────────────────────────────────────────────────────────────────


def as_json(rows: Sequence[Row]) -> str:
    return json.dumps([asdict(row) for row in rows], indent=1) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="measured times and fast.cu's texts")
    parser.add_argument("--cubins", type=Path, required=True, metavar="DIR", help="FlashAttention-3's machine code")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the rows here")
    asked = parser.parse_args(arguments)
    try:
        found = [*fa3_rows(asked.data, asked.cubins), *fast_cu_rows(asked.data)]
    except EvoengineError as error:
        parser.error(str(error))
    rows, missed = ([one for one in found if isinstance(one, kind)] for kind in (Row, Missed))
    listed = [one for one in found if isinstance(one, str)]
    if rows:
        Console(width=160).print(Markdown(page(rows, listed)))
    if asked.json:
        asked.json.write_text(as_json(rows))
    for one in missed:
        print(f"missed: {one}", file=sys.stderr)
    return 1 if missed or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
