"""KernelBench's problems as folders, and what the gate says of the naive kernels that are written for them.

    python -m benchmarks.kernelbench FOLDER [NUMBER…] [--seconds 40]

FOLDER holds KernelBench/level1 of github.com/ScalingIntelligence/KernelBench (MIT). Each kernel is judged as
benchmarks/imported.py says, within so many CPU seconds. Imported files are run.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.imported import within


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("numbers", type=int, nargs="*")
    parser.add_argument("--seconds", type=float, default=40.0)
    asked = parser.parse_args()
    for file in sorted(asked.folder.glob("*_*.py"), key=lambda path: int(path.name.split("_")[0])):
        number = int(file.name.split("_")[0])
        if not asked.numbers or number in asked.numbers:
            print(f"{number:3} {within(asked.seconds, f'kernelbench:{file}', f'level1_{number}')}", flush=True)


if __name__ == "__main__":
    main()
