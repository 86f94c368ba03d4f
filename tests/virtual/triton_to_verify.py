"""A user's file for `evoengine verify --triton`: kernels, right and wrong, with the functions that launch them."""

import torch
import triton
import triton.language as tl


def rows(kernel, m, n, values=torch.randn, **options):
    """Launch a kernel that computes a row in each program."""
    x = values(m, n)
    out = torch.empty_like(x)
    kernel[(m,)](x, out, n, **options)
    return x, out


# ── right ───────────────────────────────────────────────────────────────────────────────────────────────────────────

BLOCKS = [triton.Config({"BLOCK": block}, num_warps=warps) for block, warps in ((64, 1), (256, 2))]


@triton.autotune(BLOCKS, key=["n"])
@triton.jit
def softmax(x, out, n, BLOCK: tl.constexpr):
    row, top, total = tl.program_id(0), -float("inf"), 0.0
    for first in range(0, n, BLOCK):
        at = first + tl.arange(0, BLOCK)
        values = tl.load(x + row * n + at, mask=at < n, other=-float("inf"))
        higher = tl.maximum(top, tl.max(values))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(values - higher))
        top = higher
    for first in range(0, n, BLOCK):
        at = first + tl.arange(0, BLOCK)
        values = tl.load(x + row * n + at, mask=at < n)
        tl.store(out + row * n + at, tl.exp(values - top) / total, mask=at < n)


def call_softmax(m=3, n=150):
    x, out = rows(softmax, m, n)
    torch.testing.assert_close(out, torch.softmax(x, 1))  # as the function's own launch left it


def softmax_of(x):
    return torch.softmax(x, 1)


@triton.jit
def roots(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * n + tl.arange(0, BLOCK)
    tl.store(out + at, tl.sqrt(tl.load(x + at, mask=tl.arange(0, BLOCK) < n)), mask=tl.arange(0, BLOCK) < n)


def call_roots(m=4):
    rows(roots, m, 30, torch.rand, BLOCK=32)


def roots_of(x):
    return x.sqrt()


@triton.jit
def add_in_place(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + at, tl.load(x + at, mask=at < n) + tl.load(y + at, mask=at < n), mask=at < n)


def call_add_in_place(n=70):
    if n % 2:
        raise ValueError(f"{n} is odd")
    add_in_place[(triton.cdiv(n, 32),)](torch.randn(n), torch.randn(n), n, BLOCK=32)


def sum_of(x, y):
    return x + y


@triton.autotune(BLOCKS, key=["n"])
@triton.jit
def row_sums(x, out, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, n, BLOCK):
        total += tl.load(x + tl.program_id(0) * n + first + at, mask=first + at < n, other=0.0)
    tl.store(out + tl.program_id(0), tl.sum(total))


def call_row_sums(m=3, n=300):
    row_sums[(m,)](torch.randn(m, n), torch.empty(m), n)


def sums_of(x):
    return x.sum(-1)


# ── wrong ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@triton.autotune(BLOCKS, key=["n"])
@triton.jit
def nearly_twice(x, out, n, BLOCK: tl.constexpr):
    """Off by less than a tolerance notices, for the second configuration alone."""
    at = tl.arange(0, BLOCK)
    for first in range(0, n, BLOCK):
        factor = 2.0 if BLOCK == 64 else 2.0001
        place, inside = out + tl.program_id(0) * n + first + at, first + at < n
        tl.store(place, factor * tl.load(x + tl.program_id(0) * n + first + at, mask=inside), mask=inside)


def call_nearly_twice(m=3):
    rows(nearly_twice, m, 100, lambda *shape: torch.randn(shape).half())


@triton.autotune(BLOCKS, key=["n"])
@triton.jit
def drops_the_tail(x, out, n, BLOCK: tl.constexpr):
    """Wrong for the second configuration alone: a row that is not a multiple of 256 keeps its end."""
    row, skip = tl.program_id(0), BLOCK if BLOCK > 64 else 1
    for first in range(0, n - skip + 1, BLOCK):
        at = first + tl.arange(0, BLOCK)
        tl.store(out + row * n + at, 2 * tl.load(x + row * n + at, mask=at < n), mask=at < n)


def call_drops_the_tail(m=2, n=512):
    rows(drops_the_tail, m, n)


def twice(x):
    return 2 * x


@triton.jit
def naive_softmax(x, out, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    values = tl.exp(tl.load(x + tl.program_id(0) * n + at, mask=at < n, other=-float("inf")))
    tl.store(out + tl.program_id(0) * n + at, values / tl.sum(values), mask=at < n)


def call_naive_softmax(m=3):
    rows(naive_softmax, m, 40, BLOCK=64)


@triton.jit
def sums(x, total, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.atomic_add(total, tl.sum(tl.load(x + tl.program_id(0) * n + at, mask=at < n, other=0.0)))


def call_sums_into_anything(m=3):
    sums[(m,)](torch.randn(m, 40), torch.empty(1), 40, BLOCK=64)


def call_sums(m=3):
    sums[(m,)](torch.randn(m, 40), torch.zeros(1), 40, BLOCK=64)


def total_of(x):
    return x.sum().reshape(1)


@triton.jit
def shares_its_ends(x, out, n, BLOCK: tl.constexpr):
    """Store one element too many, where the next program's row begins."""
    at = tl.arange(0, BLOCK)
    row = tl.program_id(0) * n
    inside = (at < n + 1) & (row + at < n * tl.num_programs(0))
    tl.store(out + row + at, tl.where(at < n, 2, 3) * tl.load(x + row + at, mask=inside), mask=inside)


def call_shares_its_ends(m=3):
    rows(shares_its_ends, m, 40, BLOCK=64)


@triton.jit
def twice_of_each(xs, outs, n, BLOCK: tl.constexpr):
    """Double tensors of which tables hold the addresses."""
    at = tl.arange(0, BLOCK)
    x = tl.load(xs + tl.program_id(0)).to(tl.pointer_type(tl.float8e5))
    out = tl.load(outs + tl.program_id(0)).to(tl.pointer_type(tl.float8e5))
    tl.store(out + at, (2 * tl.load(x + at, mask=at < n).to(tl.float32)).to(tl.float8e5), mask=at < n)


def call_twice_of_each(m=3):
    xs = [torch.randn(40).to(torch.float8_e5m2) for _ in range(m)]
    outs = [torch.empty_like(x) for x in xs]
    tables = [torch.tensor([x.data_ptr() for x in tensors]) for tensors in (xs, outs)]
    twice_of_each[(m,)](*tables, 40, BLOCK=64)


def each_twice(xs):
    return [2 * x.double() for x in xs]


def each_thrice(xs):
    return [3 * x.double() for x in xs]


@triton.jit
def highest(x, high, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    values = tl.load(x + tl.program_id(0) * n + at, mask=at < n, other=-float("inf"))
    tl.store(high + tl.program_id(0), tl.max(values))


@triton.jit
def below_highest(x, high, out, n, BLOCK: tl.constexpr):
    """Store e to the power of x - high: NaN where x is far above high, as it never is."""
    at = tl.program_id(0) * n + tl.arange(0, BLOCK)
    mask = tl.arange(0, BLOCK) < n
    power = tl.exp(100 * (tl.load(x + at, mask=mask, other=0.0) - tl.load(high + tl.program_id(0))))
    tl.store(out + at, power + power * 0, mask=mask)


def call_below_highest(m=3):
    x, high = torch.randn(m, 40), torch.empty(m)
    highest[(m,)](x, high, 40, BLOCK=64)
    below_highest[(m,)](x, high, torch.empty_like(x), 40, BLOCK=64)


def call_below_anything(m=3):
    x = torch.randn(m, 40)
    below_highest[(m,)](x, x.amax(1), torch.empty_like(x), 40, BLOCK=64)


def call_nothing():
    pass


def call_with_a_fault():
    raise RuntimeError("no luck")


def call_tensor(x):
    pass


def reference_of_another(x, z):
    return x
