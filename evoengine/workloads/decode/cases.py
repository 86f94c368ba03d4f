"""The gate's cases for decode attention: lengths and pages set against a configuration's tiles and splits.

At full size it is blocks of the problem's own launch over its whole cache: offsets beyond 32 bits, the last pages of a
large pool and indices of many sequences, heads and splits show there alone. Nearly all sequences are cut short: where
their pages lie is drawn from the whole pool all the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from evoengine.records import Config, Launch, Plan
from evoengine.workloads.base import Case, LaunchOf
from evoengine.workloads.coverage import Cell
from evoengine.workloads.decode.problem import DecodeProblem, block_rows
from evoengine.workloads.full_size import chosen_blocks

MOST_WORK = 100_000_000
"""rows times keys times head_dim of a case, which takes some seconds"""
MOST_BLOCKS = 1024
"""of the case that has the problem's own heads and sequences: most of its time goes to beginning and ending blocks"""
FAR, FAR_KEYS = 1 << 15, (1 << 16) + 131
"""keys beyond which an index of 15 bits names another one, and how many a sequence has where one of 16 bits does so"""
MANY_ROWS = 33
"""enough for sums over the errors of all rows, in the case where those are independent"""
LENGTHS = (
    "of no key",
    "of a single key",
    "of fewer keys than queries",
    "that end with a step",
    "a key behind a step",
    "a key short of a step",
    "of as many keys as may be",
)
"""kinds of lengths that the cases of a configuration have"""
PAGES = ("two sequences share a page", "the last of the pool", "one that no sequence has")
FIRST_KEY = "the first key that a query sees takes all weight"
VALUES = (
    "a late key that takes all weight",
    FIRST_KEY,
    "the last key that a query sees takes all weight",
    "the first key that a query does not see would take all weight",
    "a maximum that rises along the keys",
    "logits beyond a half",
)
GROUPS = ("as the problem's are grouped", "grouped by another number, which is no power of two")
"""kinds of heads that share one of several KV heads"""
CODES = ("the largest", "subnormal ones alone")
"""kinds of codes in a cache of FP8"""
BEFORE_WINDOW = "the last key before the window would take all weight"
WINDOWS = ("begins behind the first key of a step", "begins with the last key of a step")


def step_keys(config: Config) -> int:
    """Return the keys that a block goes through in a step; 64 where the configuration does not say."""
    return int(config.get("warps", 1)) * int(config.get("tile_n", 64))


def states_tiles(config: Config) -> bool:
    """Return whether the configuration says how many keys and rows a block has."""
    return {"tile_m", "tile_n"} <= config.keys() and ("warps" in config or config.get("family") == "wgmma")


def gate_cases(problem: DecodeProblem, config: Config) -> tuple[Case[DecodeProblem], ...]:
    """Return the gate's cases for a configuration: problems that share the compile-time part of `problem`."""
    found = [*_short_cases(problem, config), *_long_cases(problem, config)]
    return tuple(replace(case, config=config, whole=problem) for case in found)


def _short_cases(problem: DecodeProblem, config: Config) -> Iterator[Case[DecodeProblem]]:
    """Yield cases that every candidate meets.

    Sequences have from no key to enough that buffers are filled three times in each split, in one batch; keys end with
    a step, one before and one behind. Pages are drawn in any order, shared, and the pool's last. Queries are several,
    heads grouped as the problem's and otherwise.
    """
    step, splits = step_keys(config), int(config.get("splits", 1))
    round_trip = (2 * int(config.get("stages", 2)) + 1) * step
    tile_m, group = block_rows(config), min(problem.group, 16) if problem.latent else problem.group
    one = replace(problem, batch=1, heads=group, kv_heads=1)
    two = replace(one, heads=2 * group, kv_heads=1 if problem.latent else 2)
    other = 3 if group != 3 else 5
    many = max(3, -(-MANY_ROWS // (2 * group * problem.seq_q)))

    def at(keys: int, batch: int = 1, base: DecodeProblem = one, seq_q: int = problem.seq_q) -> DecodeProblem:
        return replace(base, batch=batch, seq_q=seq_q, seq_k=max(keys, seq_q))

    yield Case("one key", at(1, seq_q=1))
    yield Case("unequal lengths", at(2 * step + 1, 9, two, max(2, problem.seq_q)), "unequal")
    yield Case("a long sequence among short ones", at(round_trip - 1, many, two), "one long")
    yield Case("shared pages", at(2 * step - 1, 3), "shared")
    yield Case("every split", at(splits * step + 1), "climbing")
    yield Case("pointing", at(round_trip + 3, 2, two), "pointing")
    yield Case("several queries", at(step + 5, 2, replace(two, heads=2 * other), seq_q=5), "last keys")
    if problem.window:
        yield Case("before the window", at(problem.window + step + 3, 2, seq_q=3), "before the window")
        yield Case(f"the window {WINDOWS[0]}", at(problem.window + step + 1, base=two, seq_q=1), "before the window")
        yield Case(f"the window {WINDOWS[1]}", at(problem.window + step - 1, base=two, seq_q=1), "before the window")
    if problem.cache:
        yield Case("subnormal codes", at(step + 7, 2, two), "subnormal codes")
    rows = tile_m + 3
    yield Case("rows of several tiles", at(step + 2, base=replace(one, heads=rows), seq_q=1), "logits")


def _long_cases(problem: DecodeProblem, config: Config) -> Iterator[Case[DecodeProblem]]:
    """Yield cases of candidates that may rank: the problem's own lengths, heads and batch."""
    one = replace(problem, batch=1, heads=16 if problem.latent else problem.group, kv_heads=1)
    keys = affordable_keys(problem)
    part = None if keys == problem.seq_k else f"{keys:,} of {problem.seq_k:,} keys"
    yield Case("own keys", replace(one, seq_k=keys), long=True, part=part)
    if problem.seq_k > FAR:
        far = replace(one, heads=1, seq_q=1, seq_k=min(problem.seq_k, FAR_KEYS))
        yield Case("far keys", far, "last keys", long=True, once=True)
    few = max(problem.seq_q, 17)
    batch = min(problem.batch, max(2, MOST_BLOCKS // (problem.kv_heads * int(config.get("splits", 1)))))
    if batch * problem.heads * problem.seq_q * few * problem.head_dim <= MOST_WORK:
        some = None if batch == problem.batch else f"{batch:,} of {problem.batch:,} sequences"
        yield Case("own heads and batch", replace(problem, batch=batch, seq_k=few), "unequal", long=True, part=some)


def affordable_keys(problem: DecodeProblem) -> int:
    """Return the problem's own number of keys, or the most that a case can go through."""
    return min(problem.seq_k, MOST_WORK // (max(16, problem.group * problem.seq_q) * problem.head_dim))


# Cells of a configuration, and those that a case visits.


def cells(problem: DecodeProblem, config: Config) -> frozenset[Cell]:
    """Return the cells of a configuration; none where it does not say how large tiles are."""
    if not states_tiles(config):
        return frozenset()
    found = {
        *(Cell("lengths", what) for what in LENGTHS),
        # a slope leaves nothing of a key that lies far before its query
        *(Cell("values", what) for what in VALUES if not (problem.alibi and what == FIRST_KEY)),
        *(Cell("heads", what) for what in GROUPS if not problem.latent),
        Cell("heads", "rows of several tiles"),
        Cell("queries", "several"),
        Cell("extents", "keys"),
    }
    if problem.window:
        found.add(Cell("values", BEFORE_WINDOW))
        found |= {Cell("window", what) for what in WINDOWS}
    if problem.cache:
        found |= {Cell("codes", what) for what in CODES}
    if problem.page:
        found |= {Cell("pages", what) for what in PAGES}
    if problem.seq_k > FAR:
        found.add(Cell("extents", "far keys"))
    return frozenset(found)


def visited(case: Case[DecodeProblem]) -> frozenset[Cell]:
    """Return the cells that a case visits by its sizes. What it drew is none of this."""
    whole, p, config = case.whole, case.problem, case.config
    if whole is None or not states_tiles(config):
        return frozenset()
    found = set[Cell]()
    if p.group == whole.group and p.kv_heads > 1:
        found.add(Cell("heads", GROUPS[0]))
    if p.group != whole.group and p.group & (p.group - 1) and p.kv_heads > 1:
        found.add(Cell("heads", GROUPS[1]))
    if p.group * p.seq_q > block_rows(config):
        found.add(Cell("heads", "rows of several tiles"))
    if p.seq_q > 1 and p.batch > 1:
        found.add(Cell("queries", "several"))
    if p.seq_k == affordable_keys(whole):
        found.add(Cell("extents", "keys"))
    if p.seq_k > FAR and case.draw == "last keys":
        found.add(Cell("extents", "far keys"))
    if p.window and p.seq_q == 1 and case.draw == "before the window":
        begins, step = p.seq_k - p.window, step_keys(config)
        found |= {Cell("window", what) for what, at in zip(WINDOWS, (1, step - 1), strict=True) if begins % step == at}
    return frozenset(found)


# ── at full size ──────────────────────────────────────────────────────────────────────────────────────────────────────


MOST_DRAWN = 1 << 24
"""elements of q and of the block table, which are drawn as a whole"""
MOST_KEYS = 16_384
"""that queries see of the sequence that is as long as may be: a device counts at most 65,536 touched pages of memory"""
MOST_BLOCKS = 48


@dataclass(frozen=True, slots=True)
class FullCase:
    """All splits of some tiles of rows of a launch for `problem`, each block by itself; or blocks that combine them.

    Where the last block of a tile combines its splits, that is not run.
    """

    name: str
    problem: DecodeProblem
    config: Config = field(hash=False)
    part: str | None = None
    entry: str | None = None
    """the second kernel, where it is that"""

    @property
    def splits(self) -> int:
        return int(self.config.get("splits", 1))

    @property
    def short(self) -> int:
        """Return the keys of the longest of the sequences that are cut short; most splits have some."""
        return min(self.problem.seq_k, self.splits * step_keys(self.config) + step_keys(self.config) // 2 + 3)

    @property
    def has_long(self) -> bool:
        """Return whether one sequence is as long as may be: its keys, or those within a window, are few enough."""
        p = self.problem
        return p.keys <= MOST_KEYS and self._work(p.keys) <= MOST_WORK // 4

    def _work(self, keys: int) -> int:
        return keys * block_rows(self.config) * (self.problem.head_dim + self.problem.head_dim_v) // 2

    def tiles(self, launch: Launch, seed: int) -> list[int]:
        """Return the tiles of rows that are run, as numbers in the grid, y running before z.

        The first is that of the sequence that may be as long as any.
        """
        most = min(MOST_BLOCKS // self.splits, MOST_WORK // 4 // self._work(self.short))
        return chosen_blocks((1, *launch.grid[1:]), seed)[: max(2, most)]


def full_plan(problem: DecodeProblem, config: Config, launch_of: LaunchOf) -> Plan:
    """Return the problem's own launch, each kernel's by itself; none where the configuration states no sizes of tiles.

    Nor is there one where q, the block table or the splits' states are too large to be drawn.
    """
    rows, splits = problem.batch * problem.seq_q * problem.heads, int(config.get("splits", 1))
    drawn = max(problem.batch * problem.table_width, rows * problem.head_dim, rows * splits * 2)
    if not states_tiles(config) or drawn > MOST_DRAWN:
        return ()
    launch = launch_of(problem)
    first = (FullCase("full grid", problem, config), replace(launch, then=()))
    return [first, *((FullCase("full grid, combined", problem, config, entry=k.entry), k.launch) for k in launch.then)]
