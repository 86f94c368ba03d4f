"""How many single edits of a control word, each taking away a wait that is needed, the executor reports.

    python benchmarks/control_words.py [--binaries 200] [--edits 10] [--seed 1]

Draws configurations of all shipped spaces, edits each binary's listing in turn at drawn places and looks for hazards.
The unedited binary must have none.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.drawn_binaries import draw  # noqa: E402
from evoengine.sass.core import Program  # noqa: E402
from evoengine.sass.cubin import read_kernel  # noqa: E402
from tests.support.control_words import edited, edits  # noqa: E402


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--binaries", type=int, default=200, metavar="N", help="configurations to draw")
    parser.add_argument("--edits", type=int, default=10, metavar="N", help="edits of each binary")
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args(arguments)
    random = np.random.default_rng(asked.seed)
    made, reported = Counter[str](), Counter[str]()
    false_alarms = 0
    for one in draw(asked.binaries, asked.seed):
        entry, listing = one.source.entry, one.binary.listing
        kernel = read_kernel(one.binary.cubin, entry)
        found, _ = Program(listing, entry).hazards(kernel.arch, kernel.registers)
        if found:
            false_alarms += 1
            print(f"false alarm: {one.name}: {found[0]}")
        all_edits = list(edits(listing, entry))
        for place in random.permutation(len(all_edits))[: asked.edits]:
            edit = all_edits[place]
            found, _ = Program(edited(listing, entry, edit), entry).hazards(kernel.arch, kernel.registers)
            made[edit.kind] += 1
            reported[edit.kind] += bool(found)
            if not found:
                print(f"not reported: {one.name}: {edit.kind} at {edit.address:#x}")
    for kind in sorted(made):
        print(f"{kind}: {reported[kind]} of {made[kind]}")
    print(f"all: {reported.total()} of {made.total()}; false alarms in {false_alarms} of {asked.binaries} binaries")
    return 0


if __name__ == "__main__":
    sys.exit(main())
