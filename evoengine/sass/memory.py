"""Of a launch's traffic, what the L2 and the DRAM see: the union of what a wave's blocks touch, per allocation.

some blocks of a wave, run for a while ──▶ lines they touch together ──▶ a wave ──▶ all waves, with what the L2 keeps
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from evoengine.sass.chip import Chip
from evoengine.sass.core import Program
from evoengine.sass.grid import Grid, Work
from evoengine.sass.launch import Launch
from evoengine.sass.model import WRITTEN, Traffic, survey

SURVEYED = 400_000
"""warp instructions, over all clusters, within which their beginnings are surveyed"""
FEWEST = 128
"""number of surveyed clusters, adjacent in launch order; more of them where whole ones fit into SURVEYED"""
WHOLE = 100_000
"""warp instructions of the one cluster that is surveyed beyond its beginning"""
ALSO_MAIN = 0.2
"""of the bytes of the allocation of which most are loaded, each counted once"""
BEYOND, FEWEST_BEYOND = 2.0, 16
"""where the beginnings of clusters do not reach such an allocation, beginnings of so many times the instructions until
then are surveyed for it, of a multiple of so many clusters, as what half of them touch tells how it grows"""
ONE_SWEEP = 1.5
"""over an allocation, as the steps of its blocks add up; what comes back to its beginning takes two"""
SECTOR = 32


def traffic_of(
    program: Program, launch: Launch, chip: Chip, grid: Grid, work: Work, at_once: int, cold: bool
) -> tuple[list[Traffic], float]:
    """Return the traffic of each allocation, and the bytes that are stored for the DRAM, each counted once.

    `at_once` clusters run together. With `cold` nothing is in the L2 before the launch; otherwise what fits is.
    """
    wave = max(1, min(at_once, grid.clusters))
    seen = _survey(program, launch, grid, work, wave)
    t, sizes, waves = seen.touched, seen.sizes, grid.clusters / wave
    in_all = SECTOR * (work.counts["sectors_stored"] + work.counts["tensor_sectors_stored"]) * grid.clusters
    kept, beside, loaders = seen.shares_loaded()
    written = seen.shares_written(in_all)
    _, _, hit = seen.found_again(kept, written, chip, seen.longest)
    share = hit * kept + (1 - hit) * beside
    loads, stores, hit = seen.found_again(share, written, chip, work.mean, until=seen.window(grid.clusters))
    # what a block loads after it stored there: half of all that it touches lies between, if it does both once
    _, _, found_stored = seen.found_again(share, written, chip, work.mean, part=0.5)
    again = _loaded_again(loads, stores, sizes, waves, hit, chip.l2_kept_bytes, cold)
    together = t["loaded_together"] / _at_least(t["loaded"])
    found = t["whole_found"] / _at_least(t["whole_found"] + t["whole_loaded"])
    from_dram = found * (1 - found_stored) + (1 - found) * share * again
    stored_bytes = min(in_all, float(sum(a.bytes for a in launch.allocations if a.writable)))
    if cold:
        stays = stored_bytes <= WRITTEN * chip.l2_kept_bytes
    else:
        stays = stored_bytes + np.minimum(loads * grid.clusters / wave, sizes).sum() <= chip.l2_kept_bytes
    if stays:  # what is stored is in the L2 at the end
        written, stored_bytes = np.zeros_like(written), 0.0
    sharers = np.clip(loaders * chip.sms / wave, 1, chip.sms)
    in_step = np.where(t["loaders"] > 0, t["loaders_in_step"] / _at_least(t["loaders"]), 1.0)
    columns = zip(from_dram, written, together, sharers, np.maximum(1, sharers * in_step), strict=True)
    return [Traffic(*(float(value) for value in of_one)) for of_one in columns], stored_bytes


@dataclass(frozen=True, slots=True)
class _Surveyed:
    """Memory that some of a wave's clusters touch. Arrays have one element for each allocation."""

    wave: int
    """clusters that run together"""
    surveyed: np.ndarray
    """clusters that were surveyed"""
    touched: Mapping[str, np.ndarray]
    """as `survey` returns it"""
    sizes: np.ndarray
    """bytes of the allocations"""
    longest: float
    """instructions of the cluster that was surveyed beyond its beginning"""
    stored_by_one: np.ndarray
    """bytes that it stores"""

    def shares_loaded(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return two shares of what a wave asks for, and the number of clusters that load what one loads.

        The first share is what its clusters load together if the L2 keeps it for them, the second if they only go on
        side by side.
        """
        t, wave = self.touched, self.wave
        asked = SECTOR * t["loaded"] / self.surveyed
        beside = _grown(t["bytes_loaded_half"], t["bytes_loaded"], self.surveyed, wave) / _at_least(asked * wave)
        loaders = _loaders(t, self.surveyed, wave)
        kept = t["whole_bytes_loaded"] / _at_least(SECTOR * t["whole_loaded"]) / loaders
        beside = np.where(t["loaded"] > 0, beside, np.where(t["whole_loaded"] > 0, kept, 1.0))
        return np.minimum(kept, beside), beside, loaders

    def shares_written(self, in_all: float) -> np.ndarray:
        """Return the share of the stored bytes that are stored for the first time; `in_all` bytes are stored."""
        t, wave = self.touched, self.wave
        stored = SECTOR * t["stored"] / self.surveyed
        if not t["stored"].any():  # no block has come to its stores: what they write at all bounds what they write once
            unseen = float(self.sizes[(t["loaded"] == 0) & (t["whole_loaded"] == 0)].sum())
            return np.full(self.sizes.shape, min(1.0, unseen / max(1.0, in_all)) if unseen else 1.0)
        written = _grown(t["bytes_stored_half"], t["bytes_stored"], self.surveyed, wave) / _at_least(stored * wave)
        return np.where(t["stored"] > 0, np.minimum(written, 1.0), 1.0)

    def found_again(
        self,
        share: np.ndarray,
        written: np.ndarray,
        chip: Chip,
        instructions: float,
        part: float = 1.0,
        until: np.ndarray | None = None,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return a wave's loads and stores in bytes while each cluster executes `instructions` instructions.

        `share` and `written` are the shares that count. The third result is the probability that they are still in the
        L2 after `part` of it, or after as many waves as load `until` bytes of the allocation.
        """
        t, sizes = self.touched, self.sizes
        each = (share * (SECTOR * t["whole_loaded"]), written * self.stored_by_one)
        loads, stores = (bytes_of_one * self.wave * instructions / self.longest for bytes_of_one in each)
        through, written_through = np.minimum(loads, sizes), np.minimum(stores, sizes)
        # what is loaded to be evicted first leaves the rest alone; what is to be evicted last the kernel means to find
        between = float(through[t["eviction"] >= 0].sum() + written_through.sum())
        waves = np.full(sizes.shape, part) if until is None else np.maximum(1.0, until / _at_least(loads))
        return loads, stores, np.where(t["eviction"] > 0, 1.0, _hit(waves * between, chip.l2_kept_bytes))

    def window(self, clusters: int) -> np.ndarray:
        """Return the bytes of each allocation, from its first to its last, among which one wave's loads lie.

        Where waves move on through an allocation once, as a stencil's do, later waves find what they load again within
        these bytes; where they come back to its beginning, within all of it. The step is that from the surveyed half to
        the other.
        """
        t, half, wave = self.touched, self.surveyed // 2, self.wave
        with np.errstate(invalid="ignore", divide="ignore"):
            step = np.abs(t["lowest"] - t["lowest_half"]) / half
            once = step * clusters <= ONE_SWEEP * self.sizes
            surveyed = np.maximum(t["highest"], t["highest_half"]) - np.minimum(t["lowest"], t["lowest_half"])
            of_wave = surveyed + step * (wave - self.surveyed)
        return np.where(once & (clusters > wave), np.minimum(of_wave, self.sizes), self.sizes)


def _survey(program: Program, launch: Launch, grid: Grid, work: Work, wave: int) -> _Surveyed:
    surveyed = min(wave, max(FEWEST, int(SURVEYED / max(1.0, work.mean))))
    first = min(grid.clusters // wave // 2 * wave, grid.clusters - surveyed)
    blocks = [grid.block(first + n) for n in range(surveyed)]
    limit = int(min(SURVEYED // surveyed, work.mean + 1))
    found = survey(program, launch, blocks, limit, WHOLE)
    touched, begun = dict(found.touched), np.full(launch.allocation_count, found.counts["instructions"].mean())
    clusters = np.full(launch.allocation_count, surveyed)
    late = _not_reached(touched)
    if late.any():
        limit = int(min(BEYOND * touched["whole_first"][late].max(), work.mean + 1))
        fewer = min(surveyed, max(1, SURVEYED // limit // FEWEST_BEYOND) * FEWEST_BEYOND)
        beyond = survey(program, launch, blocks[:fewer], limit, WHOLE)
        touched = {name: np.where(late, beyond.touched[name], values) for name, values in touched.items()}
        begun = np.where(late, beyond.counts["instructions"].mean(), begun)
        clusters = np.where(late, fewer, clusters)
    longest = min(work.mean, WHOLE)
    stored_by_one = SECTOR * touched["stored"] / clusters * longest / np.maximum(1.0, begun)
    return _Surveyed(wave, clusters, touched, np.array(launch.allocation_bytes, float), longest, stored_by_one)


def _not_reached(touched: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return of each allocation whether it is among those of which most is loaded, and no beginning comes to it."""
    loaded = touched["whole_bytes_loaded"]
    return np.asarray((touched["loaded"] == 0) & (loaded > 0) & (loaded >= ALSO_MAIN * loaded.max(initial=0.0)))


def _loaders(touched: Mapping[str, np.ndarray], surveyed: np.ndarray, wave: int) -> np.ndarray:
    """Return how many of a wave's blocks load what one loads, itself included, of each allocation.

    The share of the surveyed blocks that do counts that block, too. Of more blocks, more load the same as far as they
    do not load more: where all read one row of B, all of a wave do; a stencil's have as many neighbors as before.
    """
    others = np.maximum(0.0, touched["in_whole"] * surveyed - 1)
    half, whole = touched["bytes_loaded_half"], touched["bytes_loaded"]
    return np.asarray(1 + others * (wave / surveyed) ** np.where(half > 0, 1 - _power(half, whole, surveyed), 1.0))


def local_from_dram(launch: Launch, chip: Chip, resident: int) -> float:
    """Return the share of local memory's traffic behind the L1 that the L2 cannot hold."""
    threads = chip.sms * resident * math.prod(launch.threads) * math.prod(launch.cluster)
    return 1 - float(_hit(np.array(threads * launch.local_bytes, float), chip.l2_kept_bytes))


def _hit(between: np.ndarray, capacity: float) -> np.ndarray:
    """Return the probability that the L2 still has data after `between` other bytes passed through it.

    Loads that sweep over 44, 48 and 58 MB of an H100's L2, which keeps 38, find 0.58, 0.47 and 0.2 of them there
    (gpu-benches); by our own micro-benchmarks 0.28, 0.2 and 0.1, and TMA's loads 0.9, 0.5 and 0.
    """
    return np.asarray(np.clip(3 * capacity / np.maximum(1.0, between) - 2, 0.0, 1.0))


def _at_least(values: np.ndarray) -> np.ndarray:
    """Return divisors that are above 0 where there is nothing to divide."""
    return np.asarray(np.maximum(values, 1e-9))


def _grown(half: np.ndarray, whole: np.ndarray, surveyed: np.ndarray, wave: int) -> np.ndarray:
    """Extrapolate the bytes that `wave` blocks touch, from those of the surveyed ones and of their first half."""
    return np.asarray(whole * (wave / surveyed) ** _power(half, whole, surveyed))


def _power(half: np.ndarray, whole: np.ndarray, surveyed: np.ndarray) -> np.ndarray:
    """Return by which power, 0…1, touched bytes grow with the number of blocks; 1 where half of them touch none.

    Of an odd number of blocks the first half is one short of the rest.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        power = np.log(whole / half) / np.log(surveyed / (surveyed // 2))
        return np.where(half > 0, np.clip(power, 0, 1), 1.0)


def _fits(loaded: np.ndarray, stored: np.ndarray, sizes: np.ndarray, waves: float, capacity: float) -> bool:
    """Return whether the L2 keeps all that `waves` waves load and store."""
    return bool((np.minimum(loaded * waves, sizes) + np.minimum(stored * waves, sizes)).sum() <= capacity)


def _loaded_again(
    loaded: np.ndarray, stored: np.ndarray, sizes: np.ndarray, waves: float, hit: np.ndarray, capacity: float,
    cold: bool,
) -> np.ndarray:  # fmt: skip
    """Share of what waves load that the DRAM must give, of each allocation: 1 where each wave loads it again."""
    of_all = loaded * waves
    once = np.minimum(of_all, sizes)
    if _fits(loaded, stored, sizes, waves, capacity):
        return once / _at_least(of_all) if cold else np.zeros_like(of_all)
    return np.asarray((once + (of_all - once) * (1 - hit)) / _at_least(of_all))
