"""The second data set of benchmarks/measured_h100.py: the families that the first one lacks, and kernels of searches.

`FAMILIES` are drawn as in the first. Of `SEARCHED`, configurations are predicted, a start and draws, then neighbours of
the fastest, and the predicted first ten become rows beside some that are drawn from the others. Of `SPACES` as many
configurations as time permits become rows, for benchmarks that search among measured times. A row's `origin` says
which.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measured_kernels import Row, Task, attempt, configurations, make_folder, own, space_of
from evoengine.sass.build import build

FAMILIES: Sequence[tuple[str, Mapping[str, int]]] = (
    ("decode:b32,h32,kv8,s8192,d128,bf16,page16", {"two_kernels": 6, "last_block": 6}),
    ("attention-backward:b2,h16,s2048,d128,bf16,causal", {"mma": 6, "wgmma": 4}),
    ("grouped-gemm:rows=8x512,n4096,k7168,bf16,b_nk", {"wgmma": 8, "mma": 5}),
    ("varlen:h32,kv8,d128,bf16,causal,lens=512+37+2048+4000+1+700+3000+5000", {"wgmma": 8, "mma": 6}),
    ("gemm:m4096,n4096,k4096,fp8_e4m3,b_nk", {"wgmma": 8, "mma": 3}),
    ("decode:b16,h128,s4096,d576,bf16,page64", {"two_kernels": 6, "last_block": 6}),
    ("attention-backward:b2,h16,s2048,d64,fp16", {"mma": 6, "wgmma": 4}),
    ("gemm:m4096,n4096,k7168,fp8_e4m3,b_nk,block_scales", {"wgmma": 8}),
    ("grouped-gemm:rows=4x8192,n4096,k7168,fp8_e4m3,b_nk,block_scales", {"wgmma": 7}),
    ("decode:b16,h32,kv8,s8192,d128,bf16,cache_fp8_e4m3,page16", {"two_kernels": 5, "last_block": 5}),
    ("gemm:m4096,n4096,k4096,int8,b_nk", {"wgmma": 6, "mma": 5}),
    ("varlen:h16,d64,fp16,lens=16x1024", {"wgmma": 6, "mma": 5}),
    ("grouped-gemm:rows=8x1024,n4096,k4096,int8,b_nk", {"wgmma": 5, "mma": 4}),
    ("decode:b1,h32,kv8,s16384,d128,bf16", {"two_kernels": 6, "last_block": 6}),
    ("rowwise:softmax,rows8192,hidden4096,bf16", {"warp": 4, "block": 5, "cluster": 3}),
    ("rms_norm:rows8192,hidden16384,bf16", {"block": 7, "warp": 3}),
    ("attention-backward:b4,h16,s4096,d128,fp16", {"wgmma": 4, "mma": 3}),
    ("grouped-gemm:rows=8x1024,n4096,k4096,fp8_e4m3,b_nk,row_scales", {"wgmma": 5}),
    ("decode:b64,h128,s8192,d576,bf16", {"two_kernels": 4, "last_block": 4}),
    ("grouped-gemm:rows=512+37+0+2048+128+1024+7+340,n4096,k4096,bf16,b_nk", {"wgmma": 6, "mma": 3}),
    ("gemm:m128,n4096,k7168,fp8_e4m3,b_nk,block_scales", {"wgmma": 6}),
    ("varlen:h32,kv8,d128,bf16,causal,lens=4x512,kvlens=4x4096,page64", {"mma": 4, "wgmma": 4}),
    ("decode:b128,h32,kv8,s2048,d128,fp16,page64", {"two_kernels": 4, "last_block": 4}),
    ("rowwise:layer_norm,rows16384,hidden1024,fp16", {"warp": 4, "block": 4, "cluster": 2}),
    ("attention-backward:b2,h8,s1024,d64,bf16,causal", {"mma": 4, "wgmma": 3, "scalar": 2}),
    ("gemm:m64,n8192,k8192,int8,b_nk", {"wgmma": 5, "mma": 4}),
    ("grouped-gemm:rows=32x16,n4096,k4096,bf16,b_nk", {"wgmma": 5, "mma": 4}),
    ("decode:b64,h32,kv32,s1024,d64,fp16", {"two_kernels": 4, "last_block": 4}),
    ("rms_norm:rows16,hidden4096,bf16", {"block": 5, "warp": 3}),
    ("rowwise:rope,rows65536,hidden1024,d128,positions4096,bf16", {"warp": 4, "block": 4}),
)
"""problem → how many configurations of each family"""
LATER: Sequence[tuple[str, Mapping[str, int]]] = (
    ("conv2d:n32,c256,h56,w56,k256,r3,s3,pad1,bf16", {"wgmma": 8, "mma": 4}),
    ("conv2d:n32,c512,h28,w28,k256,r1,s1,fp16", {"wgmma": 6, "mma": 4}),
    ("conv2d:n32,c128,h56,w56,k128,r3,s3,stride2,pad1,fp16,bias_relu", {"wgmma": 6, "mma": 4, "direct": 2}),
    ("decode:b64,h128,s8192,d576,bf16", {"wgmma": 8, "two_kernels": 2, "last_block": 2}),
    ("decode:b16,h128,s4096,d576,bf16,page64", {"wgmma": 6}),
    ("decode:b1,h32,kv8,s8192,d128,bf16,page16", {"two_kernels": 6, "last_block": 6}),
    ("decode:b4,h32,kv8,s8192,d128,bf16,page16", {"two_kernels": 6, "last_block": 6}),
    ("decode:b32,h32,kv8,s8192,d128,bf16,page16", {"two_kernels": 4, "last_block": 4}),
    ("varlen:h32,kv8,d128,bf16,causal,lens=512+37+2048", {"wgmma": 6, "mma": 6}),
    ("varlen:h16,d128,bf16,lens=8x2048", {"wgmma": 6, "mma": 4}),
    ("b8,h16,s2048,d128,bf16", {"wgmma": 6, "mma": 4}),
    ("attention-backward:b2,h16,s8192,d128,bf16", {"wgmma": 5}),
    ("attention-backward:b2,h16,s8192,d128,bf16,causal", {"wgmma": 5}),
    ("gemm:m16,n4096,k4096,bf16", {"wgmma": 6, "mma": 6}),
    ("gemm:m4096,n4096,k4096,bf16", {"wgmma": 8}),
    ("gemm:m8192,n8192,k8192,bf16", {"wgmma": 5}),
    ("gemm:m128,n4096,k7168,fp8_e4m3,b_nk,block_scales", {"wgmma": 8}),
    ("gemm:m4096,n4096,k4096,fp8_e4m3,b_nk", {"wgmma": 6}),
    ("gemm:m4096,n4096,k7168,fp8_e4m3,b_nk,block_scales", {"wgmma": 4}),
    ("grouped-gemm:rows=8x4096,n4096,k7168,fp8_e4m3,b_nk,block_scales", {"wgmma": 4}),
    ("gemm:m1000,n5120,k5120,fp16", {"wgmma": 8, "mma": 4}),
    ("w4a16:m16,n4096,k4096,fp16,zeros", {"mma": 6, "wgmma": 6}),
    ("w4a16:m4096,n4096,k4096,bf16,g128", {"wgmma": 6, "mma": 4}),
    ("rowwise:softmax,rows64,hidden128256,bf16", {"block": 4, "cluster": 6}),
    ("rowwise:softmax,rows1,hidden128256,bf16", {"block": 2, "cluster": 4}),
    ("rowwise:cross_entropy,rows512,hidden32000,bf16", {"block": 4, "cluster": 4}),
    ("rowwise:cross_entropy,rows64,hidden128256,bf16", {"block": 2, "cluster": 6}),
    ("rowwise:rms_norm,rows16,hidden8192,bf16", {"block": 4, "cluster": 4}),
    ("rowwise:silu_mul,rows64,hidden14336,bf16", {"block": 6}),
    ("rowwise:layer_norm,rows16,hidden8192,bf16", {"block": 4, "cluster": 2}),
)
"""likewise, of what FAMILIES has no configurations of: most are problems whose marks rest on predictions"""
SEARCHED = (
    "gemm:m4096,n4096,k4096,fp16",
    "b16,h16,s2048,d64,fp16",
    "rms_norm:rows65536,hidden1024,fp16",
    "gemm:m64,n8192,k8192,bf16",
    "b2,h16,s8192,d128,fp16,causal",
    "gemm:m8192,n8192,k8192,fp16",
    "gemm:m4096,n4096,k4096,bf16",
)
FIRST_ROWS, OTHER_ROWS = 10, 6
DRAWN, ROUNDS, PARENTS, CHILDREN = 30, 3, 4, 14
"""configurations that are predicted first; rounds of neighbours, of how many, and how many of them"""
SPACES = (("gemm:m1024,n1024,k1024,fp16", 300), ("b2,h8,s1024,d64,fp16,causal", 200))
"""problem → how many configurations"""
SEED = 30
Policies = Sequence[str]
"""of the L2 with which a row is predicted at once; none where that is left to --again"""


def groups(
    of_set: Sequence[tuple[str, Mapping[str, int]]], known: Sequence[Row], policies: Policies
) -> Iterator[tuple[str, int, list[Task]]]:
    """Yield the groups of FAMILIES or LATER without the configurations of known rows.

    A group is its name, how many rows it needs, and tasks that make one each, or say why there is none.
    """
    for problem, families in of_set:
        for family, count in families.items():
            of = configurations(problem, family, count)
            yield f"{problem} {family}", count, _tasks("family", problem, of, known, policies)


def space_groups(known: Sequence[Row], policies: Policies) -> Iterator[tuple[str, int, list[Task]]]:
    """Yield the groups of SPACES, of starts and draws, likewise."""
    for problem, count in SPACES:
        target, space = space_of(problem)
        drawn = [*space.starts, *space.sample(np.random.default_rng(SEED), 3 * count)]
        of = {json.dumps(config): config for config in drawn}.values()
        have = sum(row["problem"] == str(target.problem) for row in known)
        yield f"space {problem}", max(0, count - have), _tasks("space", problem, of, known, policies)


def _tasks(
    origin: str, problem: str, configs: Iterable[Mapping[str, Any]], known: Sequence[Row], policies: Policies
) -> list[Task]:
    seen = {(row["problem"], json.dumps(row["config"])) for row in known}
    named = str(space_of(problem)[0].problem)
    wanted = [config for config in configs if (named, json.dumps(config)) not in seen]
    return [partial(_labelled, origin, problem, config, policies=policies) for config in wanted]


def search_folder(folder: Path, processes: int, seconds: float, only: str = "", known: Sequence[Row] = ()) -> None:
    """Write the predicted first configurations of searches without a gate, and draws from the others.

    Rows that are known already are where a search goes on; their binaries are not copied.

    A round of all problems is predicted by the processes together; none begins once time is up.
    """
    make_folder(folder)
    build()  # before the processes ask for it
    begun = time.monotonic()
    searches = [Search(problem, known) for problem in SEARCHED if only in problem]
    with ProcessPoolExecutor(processes) as pool:
        for turn in range(ROUNDS + 1):
            if time.monotonic() - begun > seconds:
                break
            wanted = [(search, config) for search in searches for config in search.wanted()]
            tasks = [partial(_labelled, "", search.problem, config) for search, config in wanted]
            results = pool.map(attempt, [""] * len(tasks), tasks, [folder] * len(tasks))
            for (search, config), (_, found) in zip(wanted, results, strict=True):
                search.note(config, found)
            print(f"{time.monotonic() - begun:.0f} s, round {turn}: {len(wanted)} predicted", file=sys.stderr)
    with (folder / "rows.jsonl").open("a") as file:
        for search in searches:
            for row in search.chosen():
                print(json.dumps(row, ensure_ascii=False), file=file)


class Search:
    """A search of one problem among predicted times: its starts and draws, then neighbours of the fastest."""

    def __init__(self, problem: str, known: Sequence[Row] = ()) -> None:
        self.problem = problem
        target, self._space = space_of(problem)
        self._random = np.random.default_rng(SEED)
        own = [row for row in known if row["problem"] == str(target.problem) and row["predicted"]]
        self._rows: dict[str, Row | None] = {json.dumps(row["config"]): row for row in own}

    @property
    def ranked(self) -> list[Row]:
        """Return the rows, predicted fastest first."""
        return sorted(filter(None, self._rows.values()), key=lambda row: float(row["predicted"]["cold"]["us"]))

    def wanted(self) -> list[Mapping[str, Any]]:
        """Return the configurations of the next round."""
        if not self._rows:
            of = [*self._space.starts, *self._space.sample(self._random, DRAWN)]
            return list({json.dumps(config): config for config in of}.values())
        near = {json.dumps(n): n for row in self.ranked[:PARENTS] for n in self._space.neighbours(row["config"])}
        new = [key for key in near if key not in self._rows]
        return [near[new[i]] for i in self._random.permutation(len(new))[:CHILDREN]]

    def note(self, config: Mapping[str, Any], found: Row | str) -> None:
        self._rows[json.dumps(config)] = found if isinstance(found, dict) else None

    def chosen(self) -> Iterator[Row]:
        """Yield the predicted first, then draws from the others, with their places among all."""
        places = list(range(len(self.ranked)))
        self._random.shuffle(others := places[FIRST_ROWS:])
        for origin, of in (("search first", places[:FIRST_ROWS]), ("search other", others[:OTHER_ROWS])):
            for place in of:
                yield {**self.ranked[place], "origin": origin, "place": place, "among": len(places)}


def _labelled(
    origin: str, problem: str, config: Mapping[str, Any], folder: Path, policies: Policies = ("cold",)
) -> Row | str:
    found = own(problem, config, folder, policies)
    return found if isinstance(found, str) else {**found, "origin": origin}
