"""Right Triton kernels in which tests plant faults, each with a function that launches it and a reference."""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

# ── rows ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@triton.jit
def norm(x, gain, out, stride, n, BLOCK: tl.constexpr):
    """Layer norm of rows that lie apart."""
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, n, BLOCK):
        total += tl.load(x + row * stride + first + at, mask=first + at < n, other=0.0).to(tl.float32)
    mean = tl.sum(total) / n
    squares = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, n, BLOCK):
        values = tl.load(x + row * stride + first + at, mask=first + at < n, other=0.0).to(tl.float32)
        apart = tl.where(first + at < n, values - mean, 0.0)
        squares += apart * apart
    scale = 1 / tl.sqrt(tl.sum(squares) / n + 1e-5)
    for first in range(0, n, BLOCK):
        inside = first + at < n
        values = tl.load(x + row * stride + first + at, mask=inside).to(tl.float32)
        weights = tl.load(gain + first + at, mask=inside)
        tl.store(out + row * n + first + at, (values - mean) * scale * weights, mask=inside)


def call_norm(m=3, n=150):
    x, out = torch.randn(m, n + 10).half()[:, :n], torch.empty(m, n)
    norm[(m,)](x, torch.randn(n), out, x.stride(0), n, BLOCK=64, num_warps=2)


def norm_of(x, gain):
    return torch.nn.functional.layer_norm(x.to(gain.dtype), x.shape[1:], gain, eps=1e-5)


@triton.jit
def running(x, out, n, BLOCK: tl.constexpr):
    """Running sums of rows, by chunks that hand on what they have."""
    row, at = tl.program_id(0) * n, tl.arange(0, BLOCK)
    before = 0.0
    for first in range(0, n, BLOCK):
        values = tl.load(x + row + first + at, mask=first + at < n, other=0.0)
        tl.store(out + row + first + at, before + tl.cumsum(values), mask=first + at < n)
        before += tl.sum(values)


def call_running(m=3, n=150):
    x = torch.randn(m, n)
    running[(m,)](x, torch.empty_like(x), n, BLOCK=64, num_warps=2)


def running_of(x):
    return x.cumsum(1)


@triton.jit
def counts(x, out, n, BLOCK: tl.constexpr):
    """Count in buckets how often each of sixteen integers is there."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    bucket = tl.load(x + at, mask=at < n, other=0)
    tl.atomic_add(out + bucket, 1, mask=at < n)


def call_counts(n=300):
    counts[(triton.cdiv(n, 128),)](torch.randint(0, 16, (n,)), torch.zeros(16, dtype=torch.int32), n, BLOCK=128)


def counts_of(x):
    return torch.bincount(x, minlength=16).int()


# ── products ────────────────────────────────────────────────────────────────────────────────────────────────────────


@triton.autotune(
    [
        triton.Config({"M": 64, "N": 32, "K": 32}, num_warps=4, num_stages=3),
        triton.Config({"M": 32, "N": 64, "K": 16}, num_warps=2, num_stages=2),
    ],
    key=["m", "n", "k"],
)
@triton.jit
def product(a, b, out, m, n, k, am, ak, bk, bn, om, on, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """A product of matrices with any strides, whose tiles are ordered by groups of two rows."""
    program, rows, columns = tl.program_id(0), tl.cdiv(m, M), tl.cdiv(n, N)
    first_row = program // (2 * columns) * 2
    height = min(rows - first_row, 2)
    row = first_row + program % (2 * columns) % height
    column = program % (2 * columns) // height
    r, c, i = row * M + tl.arange(0, M), column * N + tl.arange(0, N), tl.arange(0, K)
    left, right = a + r[:, None] * am + i[None, :] * ak, b + i[:, None] * bk + c[None, :] * bn
    total = tl.zeros((M, N), dtype=tl.float32)
    for step in range(0, tl.cdiv(k, K)):
        rest = k - step * K
        x = tl.load(left, mask=(r[:, None] < m) & (i[None, :] < rest), other=0.0)
        y = tl.load(right, mask=(i[:, None] < rest) & (c[None, :] < n), other=0.0)
        total = tl.dot(x, y, total)
        left += K * ak
        right += K * bk
    place = out + r[:, None] * om + c[None, :] * on
    tl.store(place, total.to(tl.float16), mask=(r[:, None] < m) & (c[None, :] < n))


def call_product(m=70, n=90, k=100):
    a, b, out = torch.randn(k, m).half().T, torch.randn(k, n).half(), torch.empty(m, n).half()
    product[lambda meta: (triton.cdiv(m, meta["M"]) * triton.cdiv(n, meta["N"]),)](
        a, b, out, m, n, k, *a.stride(), *b.stride(), *out.stride()
    )


def product_of(a, b):
    return a @ b


@triton.jit
def mapped(a, b, out, k, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """A product by tensor maps."""
    row, column = tl.program_id(0) * M, tl.program_id(1) * N
    total = tl.zeros((M, N), dtype=tl.float32)
    for i in range(0, k, K):
        total = tl.dot(a.load([row, i]), b.load([column, i]).T, total)
    out.store([row, column], total.to(tl.float16))


def call_mapped(m=100, n=50, k=160):
    if k % 8 or n % 8:
        n, k = n + -n % 8, k + -k % 8
    a, b, out = torch.randn(m, k).half(), torch.randn(n, k).half(), torch.empty(m, n).half()
    boxes = (a, [64, 32]), (b, [32, 32]), (out, [64, 32])
    mapped[(triton.cdiv(m, 64), triton.cdiv(n, 32))](
        *(TensorDescriptor.from_tensor(*each) for each in boxes), k, M=64, N=32, K=32
    )


def mapped_of(a, b):
    return a @ b.T


@triton.jit
def attend(q, k, v, out, n, scale, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr):
    """Causal attention of one head."""
    r, c, d = tl.program_id(0) * M + tl.arange(0, M), tl.arange(0, N), tl.arange(0, D)
    queries = tl.load(q + r[:, None] * D + d[None, :], mask=r[:, None] < n, other=0.0)
    top = tl.full((M,), -1e30, dtype=tl.float32)
    total = tl.zeros((M,), dtype=tl.float32)
    acc = tl.zeros((M, D), dtype=tl.float32)
    for first in range(0, tl.program_id(0) * M + M, N):
        at = first + c
        keys = tl.load(k + at[None, :] * D + d[:, None], mask=at[None, :] < n, other=0.0)
        seen = (at[None, :] < n) & (at[None, :] <= r[:, None])
        scores = tl.where(seen, tl.dot(queries, keys) * scale, -1e30)
        higher = tl.maximum(top, tl.max(scores, axis=1))
        weights = tl.exp(scores - higher[:, None])
        factor = tl.exp(top - higher)
        total = total * factor + tl.sum(weights, axis=1)
        values = tl.load(v + at[:, None] * D + d[None, :], mask=at[:, None] < n, other=0.0)
        acc = tl.dot(weights.to(tl.float16), values, acc * factor[:, None])
        top = higher
    tl.store(out + r[:, None] * D + d[None, :], acc / total[:, None], mask=r[:, None] < n)


def call_attend(n=100):
    q, k, v = (torch.randn(n, 32).half() for _ in range(3))
    attend[(triton.cdiv(n, 64),)](q, k, v, torch.empty(n, 32), n, 32**-0.5, M=64, N=32, D=32)


def attend_of(q, k, v):
    n = len(q)
    scores = (q @ k.T * 32**-0.5).masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf)
    return torch.softmax(scores, 1) @ v


# ── programs and warps that hand something on ───────────────────────────────────────────────────────────────────────


@triton.jit
def shares(x, out, partial, lock, m, n, BLOCK: tl.constexpr):
    """Sums of columns: programs add rows to what those before them have left, under a lock, which the last clears."""
    at = tl.arange(0, BLOCK)
    share = tl.load(x + tl.program_id(0) * n + at, mask=at < n, other=0.0)
    while tl.atomic_cas(lock, 0, 1) == 1:
        pass
    count = tl.load(lock + 1)
    if count > 0:
        share += tl.load(partial + at, mask=at < n)
    tl.debug_barrier()
    if count + 1 == m:
        tl.store(out + at, share, mask=at < n)
        tl.store(partial + at, 0.0, mask=at < n)
        tl.store(lock + 1, 0)
    else:
        tl.store(partial + at, share, mask=at < n)
        tl.store(lock + 1, count + 1)
    tl.debug_barrier()
    tl.atomic_xchg(lock, 0)


def call_shares(m=6, n=400):
    x = torch.randn(m, n)
    shares[(m,)](x, torch.zeros(n), torch.zeros(n), torch.zeros(2, dtype=torch.int32), m, n, BLOCK=512)


def shares_of(x, partial, lock):
    return x.sum(0), 0 * partial, 0 * lock


@triton.jit
def turned(x, scratch, out, n, BLOCK: tl.constexpr):
    """Reverse rows by way of memory."""
    row, at = tl.program_id(0) * n, tl.arange(0, BLOCK)
    tl.store(scratch + row + at, 2 * tl.load(x + row + at, mask=at < n), mask=at < n)
    tl.debug_barrier()
    tl.store(out + row + at, tl.load(scratch + row + n - 1 - at, mask=at < n), mask=at < n)


def call_turned(m=2, n=200):
    x = torch.randn(m, n)
    turned[(m,)](x, torch.empty_like(x), torch.empty_like(x), n, BLOCK=512, num_warps=4)


def turned_of(x):
    return 2 * x, 2 * x.flip(1)
