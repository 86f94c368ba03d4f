"""Fit the one free constant of wgmma's mechanism, `hgmma_mufu_loss`, to the main loops of FlashAttention-3.

    python benchmarks/fit_wgmma.py --cubins DIR

DIR holds FlashAttention-3's cubins (benchmarks/flash_attention_3.py). LOOPS has the clocks per tile of K and of Q that
follow from Nsight Compute's times of each kind's five large shapes on an H100 at 1500 MHz, by least squares over shapes
(the rows of benchmarks/hopper_accuracy.py's set fa3 that are called large). The constant is the one whose predicted
clocks are nearest to those for the same shapes. For each kind the one that the other three choose is printed too, with
which the kind is judged.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

from benchmarks import flash_attention_3 as fa3  # noqa: E402
from evoengine.sass.chip import find_chip  # noqa: E402
from evoengine.sass.model import Residents, Traffic, rates, time_sm  # noqa: E402

LOOPS = {
    "d64_192x192": (3560, 4400),
    "d64_causal_192x128": (2410, 3700),
    "d128_128x176": (3115, 3400),
    "d128_causal_128x128": (2250, 3600),
}
"""kind → clocks of an SM per tile of K, and per tile of Q"""
LARGE = ((512, 64), (1024, 32), (2048, 16), (4096, 8), (8192, 4))
"""sequence length and batch of the shapes behind LOOPS"""
SIMULATED = ((512, 6), (1024, 4), (2048, 4), (3072, 3))
"""sequence length and tiles of Q of an SM that are simulated for a kind's clocks"""
CANDIDATES = tuple(round(0.33 + 0.01 * n, 2) for n in range(12))
GHZ = 1.5
FROM_DRAM = Traffic(0.02, 0.02, 1.0)
"""as good as nothing: the clocks of the loop are free of the DRAM"""


def clocks_of(folder: Path, name: str, loss: float) -> tuple[float, float]:
    """Return predicted clocks of a tile of K and of a tile of Q, by least squares over simulated SMs."""
    program, kernel = fa3.read(folder, name)
    chip, tile, published = find_chip(fa3.CHIP), fa3.KERNELS[name].tile, fa3.KERNELS[name]
    counts, clocks = [], []
    for seqlen, tiles_of_q in SIMULATED:
        heads = max(1, round(fa3.SMS * tiles_of_q / -(-seqlen // tile.rows)))
        problem = fa3.Problem(1, heads, seqlen, published.dim, published.causal)
        launch = fa3.launch(kernel, tile, problem)
        numbers = {**rates(chip, launch.shared_bytes, GHZ), "hgmma_mufu_loss": loss}
        residents = Residents(1, [0], 0, [FROM_DRAM] * launch.allocation_count)
        steps = fa3.steps_of_tiles(tile, problem)[:: fa3.SMS]
        counts.append((len(steps), int(steps.sum())))
        clocks.append(time_sm(program, launch, numbers, residents).values["clocks"])
    of_tiles, of = np.array(counts, float), np.array(clocks)
    (per_q, per_k), *_ = np.linalg.lstsq(of_tiles / of[:, None], np.ones(len(of)), rcond=None)
    return float(per_k), float(per_q)


def errors(name: str, per_k: float, per_q: float) -> np.ndarray:
    """Return the relative error over the large shapes of a kind [shapes]."""
    tile, published = fa3.KERNELS[name].tile, fa3.KERNELS[name]
    measured_k, measured_q = LOOPS[name]
    found = []
    for seqlen, batch in LARGE:
        if name == "d128_causal_128x128" and seqlen < 2048:  # no part of its fit
            continue
        problem = fa3.Problem(batch, fa3.WIDTH // published.dim, seqlen, published.dim, published.causal)
        steps = fa3.steps_of_tiles(tile, problem)
        predicted, measured = (len(steps) * q + steps.sum() * k for q, k in ((per_q, per_k), (measured_q, measured_k)))
        found.append(predicted / measured - 1)
    return np.array(found)


def best(found: Mapping[float, Mapping[str, np.ndarray]], kinds: Sequence[str]) -> float:
    return min(found, key=lambda loss: sum(float(np.square(found[loss][kind]).sum()) for kind in kinds))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cubins", type=Path, required=True, metavar="DIR")
    folder = parser.parse_args(arguments).cubins
    if missing := [name for name in LOOPS if not (folder / f"{name}.cubin").is_file()]:
        parser.error(f"{folder} has no {', '.join(f'{name}.cubin' for name in missing)}")
    found = {
        loss: {name: errors(name, *clocks_of(folder, name, loss)) for name in LOOPS} for loss in CANDIDATES
    }  # fmt: skip
    for loss, by_kind in found.items():
        print(loss, "  ".join(f"{name} {100 * float(e.mean()):+.1f} %" for name, e in by_kind.items()))
    print(f"all four kinds: hgmma_mufu_loss = {best(found, list(LOOPS))}")
    for kind in LOOPS:
        print(f"without {kind}: {best(found, [name for name in LOOPS if name != kind])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
