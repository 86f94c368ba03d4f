"""Right Gluon kernels, which say themselves who waits for whom, for tests that plant faults in them."""

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# ── copies of Ampere ────────────────────────────────────────────────────────────────────────────────────────────────


@gluon.jit
def staged(x, out, n, BLOCK: gl.constexpr, STAGES: gl.constexpr):
    """Double rows by chunks, of which some are on their way."""
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    plain: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    at, row = gl.arange(0, BLOCK, layout=layout), gl.program_id(0) * n
    place = row + gl.arange(0, BLOCK, layout=plain)
    buffers = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK], shared)
    chunks = gl.cdiv(n, BLOCK)
    for i in gl.static_range(STAGES - 1):
        async_copy.async_copy_global_to_shared(buffers.index(i), x + row + i * BLOCK + at, i * BLOCK + at < n)
        async_copy.commit_group()
    for i in range(chunks):
        ahead = i + STAGES - 1
        async_copy.async_copy_global_to_shared(
            buffers.index(ahead % STAGES), x + row + ahead * BLOCK + at, ahead * BLOCK + at < n
        )
        async_copy.commit_group()
        async_copy.wait_group(STAGES - 1)
        values = buffers.index(i % STAGES).load(plain)
        gl.store(out + place + i * BLOCK, 2 * values, mask=place + i * BLOCK < row + n)


def call_staged(m=2, n=1300):
    n += -n % 4
    x = torch.randn(m, n)
    staged[(m,)](x, torch.empty_like(x), n, BLOCK=256, STAGES=3, num_warps=2)


def staged_of(x):
    return 2 * x


# ── copies of Hopper, by warps of their own ─────────────────────────────────────────────────────────────────────────


@gluon.jit
def fetch(source, target, bars, buffers, stores, tiles):
    full, empty, done, left = bars
    for i in range(tiles):
        at, phase = i % 2, i // 2 & 1
        mbarrier.wait(empty.index(at), phase ^ 1)
        mbarrier.expect(full.index(at), source.block_type.nbytes)
        tma.async_copy_global_to_shared(source, [gl.program_id(0) * 32, i * 32], full.index(at), buffers.index(at))


@gluon.jit
def put(source, target, bars, buffers, stores, tiles):
    full, empty, done, left = bars
    for i in range(tiles):
        at, phase = i % 2, i // 2 & 1
        mbarrier.wait(done.index(at), phase)
        tma.async_copy_shared_to_global(target, [gl.program_id(0) * 32, i * 32], stores.index(at))
        tma.store_wait(0)
        mbarrier.arrive(left.index(at), count=1)
    tma.store_wait(0)


@gluon.jit
def double(bars, buffers, stores, tiles, layout: gl.constexpr):
    full, empty, done, left = bars
    for i in range(tiles):
        at, phase = i % 2, i // 2 & 1
        mbarrier.wait(full.index(at), phase)
        values = buffers.index(at).load(layout)
        fence_async_shared()
        mbarrier.arrive(empty.index(at), count=1)
        mbarrier.wait(left.index(at), phase ^ 1)
        stores.index(at).store(2 * values)
        fence_async_shared()
        mbarrier.arrive(done.index(at), count=1)


@gluon.jit
def ring(source, target, n, num_warps: gl.constexpr):
    """Double a matrix: one warp loads tiles, four compute, and one stores."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [num_warps, 1], [1, 0])
    buffers = gl.allocate_shared_memory(gl.float32, [2, 32, 32], source.layout)
    stores = gl.allocate_shared_memory(gl.float32, [2, 32, 32], target.layout)
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    left = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
        mbarrier.init(done.index(i), count=1)
        mbarrier.init(left.index(i), count=1)
    bars = (full, empty, done, left)
    tiles = gl.cdiv(n, 32)
    gl.warp_specialize(
        [
            (double, (bars, buffers, stores, tiles, layout)),
            (fetch, (source, target, bars, buffers, stores, tiles)),
            (put, (source, target, bars, buffers, stores, tiles)),
        ],
        [1, 1],
        [24, 24],
    )


def call_ring(m=40, n=200):
    n += -n % 4
    x, out = torch.randn(m, n), torch.empty(m, n)
    layout = gl.NVMMASharedLayout.get_default_for([32, 32], gl.float32)
    both = [TensorDescriptor.from_tensor(each, [32, 32], layout) for each in (x, out)]
    ring[(triton.cdiv(m, 32),)](*both, n, num_warps=4, maxnreg=128)


def ring_of(source):
    return 2 * source


# ── products that go on meanwhile ───────────────────────────────────────────────────────────────────────────────────


@gluon.jit
def multiplied(a, b, out, k, num_warps: gl.constexpr):
    """A product of tiles, each loaded while the one before is being multiplied."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 32, 16])
    left = gl.allocate_shared_memory(gl.float16, [2, 64, 32], a.layout)
    right = gl.allocate_shared_memory(gl.float16, [2, 32, 32], b.layout)
    bars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(bars.index(i), count=1)
    row = gl.program_id(0) * 64
    total = warpgroup_mma_init(gl.zeros((64, 32), dtype=gl.float32, layout=layout))
    for i in range(gl.cdiv(k, 32)):
        at, phase = i % 2, i // 2 & 1
        mbarrier.expect(bars.index(at), a.block_type.nbytes + b.block_type.nbytes)
        tma.async_copy_global_to_shared(a, [row, i * 32], bars.index(at), left.index(at))
        tma.async_copy_global_to_shared(b, [i * 32, 0], bars.index(at), right.index(at))
        mbarrier.wait(bars.index(at), phase)
        total = warpgroup_mma_wait(num_outstanding=0, deps=(total,))
        total = warpgroup_mma(left.index(at), right.index(at), total, is_async=True)
    total = warpgroup_mma_wait(num_outstanding=0, deps=(total,))
    for i in gl.static_range(2):
        mbarrier.invalidate(bars.index(i))
    tile = gl.allocate_shared_memory(gl.float32, [64, 32], out.layout)
    tile.store(total)
    fence_async_shared()
    tma.async_copy_shared_to_global(out, [row, 0], tile)
    tma.store_wait(0)


def call_multiplied(m=100, k=200):
    k += -k % 8
    a, b, out = torch.randn(m, k).half(), torch.randn(k, 32).half(), torch.empty(m, 32)
    boxes = (a, [64, 32], gl.float16), (b, [32, 32], gl.float16), (out, [64, 32], gl.float32)
    maps = [
        TensorDescriptor.from_tensor(each, box, gl.NVMMASharedLayout.get_default_for(box, dtype))
        for each, box, dtype in boxes
    ]
    multiplied[(triton.cdiv(m, 64),)](*maps, k, num_warps=4)


def multiplied_of(a, b):
    return a.float() @ b.float() if a.dtype == torch.float16 else a @ b
