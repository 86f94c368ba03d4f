"""Triton kernels for the virtual GPU's tests, right ones and such with a planted fault."""

import triton
import triton.language as tl


@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n) + tl.load(y + at, mask=at < n), mask=at < n)


@triton.jit
def add_without_mask(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at) + tl.load(y + at, mask=at < n), mask=at < n)


@triton.jit
def overlap(out, n, BLOCK: tl.constexpr):
    """Store a program's number; the last element is the next program's first."""
    number = tl.program_id(0)
    at = number * (BLOCK - 1) + tl.arange(0, BLOCK)
    tl.store(out + at, at * 0 + number, mask=at < n)


@triton.jit
def double_in_place(x, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x + at, 2 * tl.load(x + at, mask=at < n), mask=at < n)


@triton.jit
def scale_in_place(x, n, BLOCK: tl.constexpr):
    """Load the row twice: for its maximum, then to divide it by that, as cross entropies do with their gradients."""
    top = 0.0
    for first in range(0, n, BLOCK):
        at = first + tl.arange(0, BLOCK)
        top = tl.maximum(top, tl.max(tl.load(x + at, mask=at < n, other=0.0)))
    for first in range(0, n, BLOCK):
        at = first + tl.arange(0, BLOCK)
        tl.store(x + at, tl.load(x + at, mask=at < n) / top, mask=at < n)


@triton.jit
def add_the_next_in_place(x, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x + at, tl.load(x + at, mask=at < n) + tl.load(x + at + 1, mask=at + 1 < n), mask=at < n)


@triton.jit
def count_without_a_barrier(x, counter, BLOCK: tl.constexpr):
    """A warp may load the counter after another one has raised it."""
    count = tl.load(counter)
    if count == 0:
        tl.store(x + tl.arange(0, BLOCK), 1.0)
    tl.store(counter, count + 1)


@triton.jit
def increment(counter):
    tl.atomic_add(counter, 1)


@triton.jit
def store_scalars(out, none, b, i, j, f, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    if b:
        tl.store(out + at, (i + j).to(tl.float64) + f + at * 0)


@triton.jit
def rounded_product(a, b, out, K: tl.constexpr, BYTES: tl.constexpr):
    """A product of 64 × K and K × 32 elements, of which the left ones are rounded first: they stay in registers."""
    r, c, k = tl.arange(0, 64), tl.arange(0, 32), tl.arange(0, K)
    left = tl.load(a + r[:, None] * K + k[None, :]).to(BYTES)
    right = tl.load(b + c[None, :] * K + k[:, None])
    tl.store(out + r[:, None] * 32 + c[None, :], tl.dot(left, right))


@triton.jit
def copy_tile(source, target, ROWS: tl.constexpr, COLS: tl.constexpr):
    at = [tl.program_id(0) * ROWS, tl.program_id(1) * COLS]
    target.store(at, source.load(at))


tuned_add = triton.autotune(
    [triton.Config({"BLOCK": 32}, num_warps=1), triton.Config({"BLOCK": 1024}, num_warps=4)], key=["n"]
)(add)


@triton.jit
def copy_by_own_map(source, target, rows, columns, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Copy a tile by tensor maps that the program makes."""
    given = tl.make_tensor_descriptor(source, [rows, columns], [columns, 1], [ROWS, COLS])
    made = tl.make_tensor_descriptor(target, [rows, columns], [columns, 1], [ROWS, COLS])
    at = [tl.program_id(0) * ROWS, tl.program_id(1) * COLS]
    made.store(at, given.load(at))


@triton.jit
def sum_of_pointed(table, out, count, N: tl.constexpr):
    """Add up rows to which a table of addresses points."""
    at = tl.arange(0, N)
    total = tl.zeros((N,), tl.float32)
    for n in range(count):
        total += tl.load(tl.load(table + n).to(tl.pointer_type(tl.float32)) + at)
    tl.store(out + at, total)


@triton.jit
def says(x, n):
    tl.device_print("value", tl.load(x))
    tl.device_assert(n < 3, "n is too large")


@triton.jit
def copy_block(source, target, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, D: tl.constexpr, E: tl.constexpr):
    """Copy the second block along each dimension of five to the first."""
    target.store([0, 0, 0, 0, 0], source.load([A, B, C, D, E]))
