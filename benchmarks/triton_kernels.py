"""Triton kernels whose machine code the executor is tried on; `triton_binaries.py` compiles them."""

import triton
import triton.language as tl


@triton.jit
def softmax(x, out, cols, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    values = tl.load(x + row * cols + at, mask=at < cols, other=-float("inf"))
    weights = tl.exp(values - tl.max(values, axis=0))
    tl.store(out + row * cols + at, weights / tl.sum(weights, axis=0), mask=at < cols)


@triton.jit
def layer_norm(x, gain, out, cols, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    values = tl.load(x + row * cols + at, mask=at < cols, other=0.0)
    centred = tl.where(at < cols, values - tl.sum(values, axis=0) / cols, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, axis=0) / cols + 1e-5)
    tl.store(out + row * cols + at, centred * scale * tl.load(gain + at, mask=at < cols, other=0.0), mask=at < cols)


@triton.jit
def cumsum(x, out, cols, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    values = tl.load(x + row * cols + at, mask=at < cols, other=0.0)
    tl.store(out + row * cols + at, tl.cumsum(values, axis=0), mask=at < cols)


@triton.jit
def sort(x, out, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.sort(tl.load(x + at)))


@triton.jit
def transpose(x, out, rows, cols, BLOCK: tl.constexpr):
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tile = tl.load(x + r[:, None] * cols + c[None, :], mask=(r[:, None] < rows) & (c[None, :] < cols))
    tl.store(out + c[:, None] * rows + r[None, :], tl.trans(tile), mask=(c[:, None] < cols) & (r[None, :] < rows))


@triton.jit
def matmul(a, b, out, m, n, k, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    r = tl.program_id(0) * M + tl.arange(0, M)
    c = tl.program_id(1) * N + tl.arange(0, N)
    total = tl.zeros((M, N), dtype=tl.float32)
    for first in range(0, k, K):
        i = first + tl.arange(0, K)
        left = tl.load(a + r[:, None] * k + i[None, :], mask=(r[:, None] < m) & (i[None, :] < k), other=0.0)
        right = tl.load(b + i[:, None] * n + c[None, :], mask=(i[:, None] < k) & (c[None, :] < n), other=0.0)
        total = tl.dot(left, right, total)
    tl.store(out + r[:, None] * n + c[None, :], total, mask=(r[:, None] < m) & (c[None, :] < n))


@triton.jit
def attention(q, k, v, out, keys, scale, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr):
    r, c, d = tl.program_id(0) * M + tl.arange(0, M), tl.arange(0, N), tl.arange(0, D)
    queries = tl.load(q + r[:, None] * D + d[None, :])
    top = tl.full((M,), -1e30, dtype=tl.float32)
    total = tl.zeros((M,), dtype=tl.float32)
    acc = tl.zeros((M, D), dtype=tl.float32)
    for first in range(0, keys, N):
        at = first + c
        key = tl.load(k + at[None, :] * D + d[:, None], mask=at[None, :] < keys, other=0.0)
        scores = tl.where(at[None, :] < keys, tl.dot(queries, key) * scale, -1e30)
        higher = tl.maximum(top, tl.max(scores, axis=1))
        weights = tl.exp(scores - higher[:, None])
        factor = tl.exp(top - higher)
        total = total * factor + tl.sum(weights, axis=1)
        value = tl.load(v + at[:, None] * D + d[None, :], mask=at[:, None] < keys, other=0.0)
        acc = tl.dot(weights.to(tl.float16), value, acc * factor[:, None])
        top = higher
    tl.store(out + r[:, None] * D + d[None, :], acc / total[:, None])


@triton.jit
def column_sums(x, out, partial, lock, rows, cols, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Add the shares of several programs under a lock, the last of which stores the sums."""
    at = tl.arange(0, BLOCK)
    share = tl.zeros((BLOCK,), dtype=tl.float32)
    for row in range(tl.program_id(0) * ROWS, min(tl.program_id(0) * ROWS + ROWS, rows)):
        share += tl.load(x + row * cols + at, mask=at < cols, other=0.0)
    while tl.atomic_cas(lock, 0, 1) == 1:
        pass
    count = tl.load(lock + 1)
    if count > 0:
        share += tl.load(partial + at, mask=at < cols)
    tl.debug_barrier()
    if count + 1 == tl.num_programs(0):
        tl.store(out + at, share, mask=at < cols)
        tl.store(lock + 1, 0)
    else:
        tl.store(partial + at, share, mask=at < cols)
        tl.store(lock + 1, count + 1)
    tl.debug_barrier()
    tl.atomic_xchg(lock, 0)
