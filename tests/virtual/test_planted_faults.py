"""Faults of Triton and Gluon kernels, one each in a right one, in its source or in its machine code: all are found."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from evoengine.gpu import find_gpu
from evoengine.sass.listing import instructions
from evoengine.virtual import device
from evoengine.workloads.triton_kernel import read_host
from tests.support.control_words import edited, edits
from tests.support.exhaustive import more

pytest.importorskip("triton", reason="Triton is not installed")

from evoengine.virtual.verify import Session

FOLDER = Path(__file__).parent
TRITON, GLUON = FOLDER / "triton_planted.py", FOLDER / "gluon_planted.py"
KERNELS = {
    **dict.fromkeys(("norm", "running", "counts", "product", "mapped", "attend", "shares", "turned"), TRITON),
    **dict.fromkeys(("staged", "ring", "multiplied"), GLUON),
}
OUTSIDE, NEVER, ERROR, UNORDERED = "outside all tensors", "never written", "error ", "nothing orders the two"
WAITS = "wait for what"


pytestmark = pytest.mark.usefixtures("tools", "compiled_anew")


def reasons(file: Path, kernel: str, configs: slice = slice(None)) -> list[str | None]:
    """Gate the kernel, and return for each configuration why it is wrong; None for a right one."""
    session = Session(read_host(f"{file}::{kernel}", f"call_{kernel}", f"{kernel}_of"), find_gpu("h100"), seed=1)
    wrong = [session.gate(number).wrong for number in range(len(session.configs))[configs]]
    return [attempt and attempt.reason for attempt in wrong]


@pytest.mark.parametrize("kernel", ["shares", "ring", *more(sorted(KERNELS.keys() - {"shares", "ring"}))])
def test_a_right_kernel_passes(kernel):
    assert not any(reasons(KERNELS[kernel], kernel))


# ── in the source ───────────────────────────────────────────────────────────────────────────────────────────────────

FAULTS = [
    # kernel, name, text of the right kernel, text of the broken one, what is said
    ("norm", "no mask on a load", "first + at, mask=first + at < n, other=0.0).to(tl.float32)\n        apart", "first + at).to(tl.float32)\n        apart", OUTSIDE),
    ("norm", "no mask on the store", "* weights, mask=inside)", "* weights)", UNORDERED),
    ("norm", "a mask that is one too wide", "inside = first + at < n", "inside = first + at <= n", OUTSIDE),
    ("norm", "a mask that is one too narrow", "inside = first + at < n", "inside = first + at < n - 1", NEVER),
    ("norm", "rows as if they lay side by side", "x + row * stride", "x + row * n", ERROR),
    ("norm", "the stride of another tensor", "out + row * n", "out + row * stride", OUTSIDE),
    ("norm", "a mean of the block", "tl.sum(total) / n", "tl.sum(total) / BLOCK", ERROR),
    ("norm", "what is masked counts", "tl.where(first + at < n, values - mean, 0.0)", "values - mean", ERROR),
    ("norm", "no epsilon", " + 1e-5)", ")", ERROR),
    ("norm", "a sum that begins with another", "squares = tl.zeros((BLOCK,), dtype=tl.float32)", "squares = total", ERROR),
    ("norm", "a sum that begins anew", "        apart =", "        squares = tl.zeros((BLOCK,), dtype=tl.float32)\n        apart =", ERROR),
    ("norm", "a chunk is left out", "for first in range(0, n, BLOCK):\n        inside", "for first in range(0, n - BLOCK, BLOCK):\n        inside", NEVER),
    ("norm", "the same weights for each chunk", "gain + first + at", "gain + at", ERROR),
    ("running", "nothing is handed on", "before += tl.sum", "before = tl.sum", ERROR),
    ("running", "begins with something", "before = 0.0", "before = 1e-3", ERROR),
    ("counts", "what is masked is counted", "1, mask=at < n", "1", ERROR),
    ("counts", "no atomic addition", "tl.atomic_add(out + bucket, 1, mask=at < n)", "tl.store(out + bucket, tl.load(out + bucket) + 1, mask=at < n)", UNORDERED),
    ("counts", "counters that nobody has cleared", "torch.zeros(16", "torch.empty(16", ERROR),
    ("product", "the last step along k is left out", "tl.cdiv(k, K)", "k // K", ERROR),
    ("product", "the first step along k is left out", "for step in range(0,", "for step in range(1,", ERROR),
    ("product", "no mask along k", "(i[:, None] < rest) & (c", "(c", OUTSIDE),
    ("product", "a mask along k that is one too wide", "rest = k - step * K", "rest = k - step * K + 1", OUTSIDE),
    ("product", "a stride of one", "left += K * ak", "left += K", ERROR),
    ("product", "the other stride", "right += K * bk", "right += K * bn", ERROR),
    ("product", "the other tensor's stride", "r[:, None] * om", "r[:, None] * am", OUTSIDE + "|" + UNORDERED),
    ("product", "sums are lost", "tl.dot(x, y, total)\n        left", "tl.dot(x, y)\n        left", ERROR),
    ("product", "sums begin with something", "total = tl.zeros((M, N), dtype=tl.float32)\n    for step", "total = tl.full((M, N), 1e-2, dtype=tl.float32)\n    for step", ERROR),
    ("product", "rounded to another type", "total.to(tl.float16), mask=(r", "total.to(tl.bfloat16).to(tl.float16), mask=(r", ERROR),
    ("product", "the last group is as high as the others", "height = min(rows - first_row, 2)", "height = 2", NEVER + "|" + OUTSIDE + "|" + UNORDERED),
    ("product", "a grid that is too small", 'triton.cdiv(n, meta["N"])', 'n // meta["N"]', NEVER),
    ("mapped", "the last step along k is left out", "range(0, k, K)", "range(0, k - K + 1, K)", ERROR),
    ("mapped", "not transposed", "b.load([column, i]).T", "b.load([i, column])", ERROR),
    ("mapped", "one column off", "a.load([row, i])", "a.load([row, i + 1])", ERROR),
    ("attend", "sums are not scaled anew", "acc * factor[:, None])", "acc)", ERROR),
    ("attend", "sees one key too few", "(at[None, :] <= r[:, None])", "(at[None, :] < r[:, None])", ERROR),
    ("attend", "sees one key too many", "(at[None, :] <= r[:, None])", "(at[None, :] <= r[:, None] + 1)", ERROR),
    ("attend", "a maximum of the last tile", "tl.maximum(top, tl.max(scores, axis=1))", "tl.max(scores, axis=1)", NEVER),
    ("attend", "no maximum", "tl.maximum(top, tl.max(scores, axis=1))", "top * 0", NEVER),
    ("attend", "weights of too few bits", "weights.to(tl.float16), values", "weights.to(tl.float8e5).to(tl.float16), values", ERROR),
    ("shares", "no barrier before the lock is released", "    tl.debug_barrier()\n    tl.atomic_xchg", "    tl.atomic_xchg", UNORDERED),
    ("shares", "no barrier behind the count", "    tl.debug_barrier()\n    if count + 1", "    if count + 1", UNORDERED),
    ("shares", "the lock is released early", "    if count + 1 == m", "    tl.atomic_xchg(lock, 0)\n    if count + 1 == m", UNORDERED),
    ("shares", "a lock that orders nothing", "tl.atomic_cas(lock, 0, 1)", "tl.atomic_cas(lock, 0, 1, sem='relaxed')", UNORDERED),
    ("shares", "a release that orders nothing", "tl.atomic_xchg(lock, 0)", "tl.atomic_xchg(lock, 0, sem='relaxed')", UNORDERED),
    ("shares", "a lock of one multiprocessor", "tl.atomic_cas(lock, 0, 1)", "tl.atomic_cas(lock, 0, 1, scope='cta')", UNORDERED),
    ("shares", "released by a plain store", "tl.atomic_xchg(lock, 0)", "tl.store(lock, 0)", UNORDERED),
    ("shares", "never released", "    tl.atomic_xchg(lock, 0)\n", "", "no end after as many"),
    ("shares", "the first share is dropped", "count > 0", "count > 1", ERROR),
    ("shares", "nothing is stored", "        tl.store(out + at, share, mask=at < n)\n", "", "the kernel writes 2: partial, lock"),
    ("turned", "no barrier", "    tl.debug_barrier()\n    tl.store(out + row", "    tl.store(out + row", UNORDERED),
    ("staged", "no wait for copies", "        async_copy.wait_group(STAGES - 1)\n", "", "LDGSTS"),
    ("staged", "waits for one too few", "wait_group(STAGES - 1)", "wait_group(STAGES)", "LDGSTS"),
    ("staged", "a group that is not closed", "        async_copy.commit_group()\n        async_copy.wait", "        async_copy.wait", "LDGSTS"),
    ("staged", "one buffer too few", "ahead % STAGES", "ahead % (STAGES - 1)", "LDGSTS"),
    ("ring", "no wait for what is loaded", "        mbarrier.wait(full.index(at), phase)\n        values", "        values", "UTMALDG"),
    ("ring", "no wait for an empty buffer", "        mbarrier.wait(empty.index(at), phase ^ 1)\n", "", "UTMALDG"),
    ("ring", "waits for the other phase", "mbarrier.wait(empty.index(at), phase ^ 1)", "mbarrier.wait(empty.index(at), phase)", WAITS),
    ("ring", "a buffer is released early", "        values = buffers.index(at).load(layout)\n        fence_async_shared()\n        mbarrier.arrive(empty.index(at), count=1)\n", "        mbarrier.arrive(empty.index(at), count=1)\n        values = buffers.index(at).load(layout)\n", "UTMALDG"),
    ("ring", "a buffer is never released", "        mbarrier.arrive(empty.index(at), count=1)\n", "", WAITS),
    ("ring", "no fence before a tile is stored", "        fence_async_shared()\n        mbarrier.arrive(done", "        mbarrier.arrive(done", "no proxy fence"),
    ("ring", "no wait for the store's buffer", "        mbarrier.wait(left.index(at), phase ^ 1)\n", "", "UTMASTG"),
    ("ring", "no wait for the store", "        tma.store_wait(0)\n        mbarrier.arrive(left", "        mbarrier.arrive(left", "UTMASTG"),
    ("ring", "announced before it is written", "        stores.index(at).store(2 * values)\n        fence_async_shared()\n        mbarrier.arrive(done.index(at), count=1)", "        mbarrier.arrive(done.index(at), count=1)\n        stores.index(at).store(2 * values)", "UTMASTG"),
    ("ring", "too many bytes are expected", "full.index(at), source.block_type.nbytes)", "full.index(at), source.block_type.nbytes * 2)", WAITS),
    ("ring", "too few bytes are expected", "full.index(at), source.block_type.nbytes)", "full.index(at), source.block_type.nbytes // 2)", WAITS),
    ("ring", "a barrier that nobody has made", "        mbarrier.init(left.index(i), count=1)\n", "", "SYNCS"),
    ("ring", "a barrier of two arrivals", "mbarrier.init(full.index(i), count=1)", "mbarrier.init(full.index(i), count=2)", WAITS),
    ("multiplied", "no wait for tiles", "        mbarrier.wait(bars.index(at), phase)\n", "", "UTMALDG"),
    ("multiplied", "no wait for the products before", "total = warpgroup_mma_wait(num_outstanding=0, deps=(total,))\n        total", "total = warpgroup_mma_wait(num_outstanding=1, deps=(total,))\n        total", "HGMMA"),
    ("multiplied", "one buffer", "at, phase = i % 2, i // 2 & 1\n        mbarrier.expect", "at, phase = 0, i & 1\n        mbarrier.expect", "HGMMA"),
    ("multiplied", "ends before its store has read", "tile)\n    tma.store_wait(0)\n", "tile)\n", "UTMASTG"),
]  # fmt: skip # a table
FAST = [fault for fault in FAULTS if fault[1] in ("no mask along k", "no barrier before the lock is released", "never released", "nothing is stored", "a buffer is released early", "no fence before a tile is stored")]  # fmt: skip


@pytest.mark.parametrize(
    ("kernel", "name", "right", "broken", "reason"), [*FAST, *more([fault for fault in FAULTS if fault not in FAST])]
)
def test_a_fault_in_the_source_is_found(kernel, name, right, broken, reason, tmp_path):
    text = KERNELS[kernel].read_text()
    assert right in text, f"{name}: the text is not in the right kernels"
    file = tmp_path / f"{kernel}_planted.py"
    file.write_text(text.replace(right, broken))
    found = reasons(file, kernel)
    assert all(found), name
    assert re.search(reason, found[0]), found[0]


# ── in the machine code ─────────────────────────────────────────────────────────────────────────────────────────────

LAST = slice(-1, None)
LOST = [
    # kernel, pattern of the instructions of which each alone is taken out, what is said
    ("turned", r"BAR\.SYNC", UNORDERED),
    ("product", r"BAR\.SYNC", UNORDERED),
    ("staged", r"DEPBAR", "LDGSTS"),
    ("mapped", r"WARPGROUP\.|FENCE|UTMACMDFLUSH|^DEPBAR", ""),
]


@pytest.mark.parametrize(("kernel", "pattern", "reason"), [LOST[0], *more(LOST[1:])])
def test_an_instruction_that_orders_something_is_missed(kernel, pattern, reason, monkeypatch):
    own = device.linked_listing
    listing = the_listing(kernel, monkeypatch)
    places = [i for i in instructions(listing, kernel) if re.search(pattern, i.text)]
    assert places
    for place in places:
        without = re.sub(rf"(/\*{place.address:04x}\*/\s+)[^;]*;", r"\g<1>NOP ;", listing, count=1)
        monkeypatch.setattr(device, "linked_listing", lambda *of, w=without: w if own(*of) == listing else own(*of))
        (found,) = reasons(KERNELS[kernel], kernel, LAST)
        assert found is not None and re.search(reason, found), f"{place.address:#x} {place.text}: {found}"


def the_listing(kernel: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the listing of the kernel's last configuration, as it is compiled for the function's own sizes."""
    own, seen = device.linked_listing, []
    monkeypatch.setattr(device, "linked_listing", lambda *of: seen.append(own(*of)) or seen[-1])
    assert reasons(KERNELS[kernel], kernel, LAST) == [None]
    monkeypatch.setattr(device, "linked_listing", own)
    return seen[0]


@pytest.mark.parametrize("kernel", more(["norm", "attend", "mapped"]))
def test_a_wait_that_is_taken_away_makes_a_kernel_wrong(kernel, monkeypatch):
    """It is a hazard of registers, which is told before anything is executed."""
    own = device.linked_listing
    listing = the_listing(kernel, monkeypatch)
    for edit in list(edits(listing, kernel))[::10]:
        broken = edited(listing, kernel, edit)
        monkeypatch.setattr(device, "linked_listing", lambda *of, b=broken: b if own(*of) == listing else own(*of))
        (found,) = reasons(KERNELS[kernel], kernel, LAST)
        assert found is not None and re.search("R[0-9]+", found), edit
