"""Write docs/accuracy.md and evoengine/sass/validation.toml from rows of predicted and measured times.

    python benchmarks/accuracy_page.py ROWS.json …

ROWS.json are what `benchmarks/hopper_accuracy.py --json` and `evoengine accuracy --kernels DIR --json` write. Sets that
chose a constant of the model (CHOSE) are shown, and count in no error of a class.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from evoengine.accuracy.page import Row, as_toml, class_errors, page  # noqa: E402
from evoengine.sass import predict  # noqa: E402
from evoengine.sass.predict import MODEL_VERSION  # noqa: E402

PAGE = ROOT / "docs" / "accuracy.md"
CHOSE: Mapping[str, tuple[str, ...]] = {
    "recorded": ("convolution", "convolution_milo", "dedispersion_milo", "gemm"),
    "residuals": ("convolution", "convolution_milo"),
    "fa2": (),
    "clock_logs": (),
    "turnover": (),
    "own_h100": (),
    "own_rows": ("measured_h100, even",),
    "own_families": ("measured_h100, families",),
}
"""source of chips.toml whose rates are fitted or inferred → sets whose times chose them; `fa2`,
`clock_logs`, `turnover` and `own_h100` are figures that no set here has"""
BEGINS = "<!-- by benchmarks/accuracy_page.py -->"


def read(files: Sequence[Path]) -> list[Row]:
    rows = []
    for file in files:
        found = json.loads(file.read_text())
        rows += [Row(**row) for row in (found["rows"] if isinstance(found, dict) else found)]
    chosen_by = {name for sets in CHOSE.values() for name in sets}
    return [replace(row, fitted=row.fitted or row.set in chosen_by) for row in rows]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", type=Path, nargs="+", metavar="ROWS.json")
    rows = read(parser.parse_args(arguments).files)
    made = f"Version {MODEL_VERSION} of the model, {datetime.now(UTC):%Y-%m-%d}."
    before = PAGE.read_text().partition(BEGINS)[0]
    PAGE.write_text(f"{before}{BEGINS}\n\n{made}\n\n{page(rows)}")
    comment = "".join(line for line in predict.VALIDATION.read_text().splitlines(True) if line.startswith("#"))
    predict.VALIDATION.write_text(f"{comment}\n{as_toml(class_errors(rows))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
