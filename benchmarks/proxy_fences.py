"""Whether an H100 ever shows what a missing proxy fence permits. On a GPU of sm_90 with CuPy.

    python benchmarks/proxy_fences.py [--rounds 20000]

Each block writes a place in shared memory by a store or by `mbarrier.init`, and lets TMA write or read the same place
without `fence.proxy.async` between the two, in the same thread or behind a barrier of the block. PTX leaves the order
of the two open. A line of the table is one such pair: how often the place held what it should not, of how many times.
The last line stores after TMA was told to read, without a wait, and must show violations: it shows that the test can.
"""

from __future__ import annotations

import argparse

import cupy

SOURCE = r"""
#define PTX asm volatile
typedef unsigned long long u64;
typedef unsigned u32;
__device__ u32 at(void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ void init(u64* b, u32 n) { PTX("mbarrier.init.shared.b64 [%0], %1;" :: "r"(at(b)), "r"(n) : "memory"); }
__device__ void wait(u64* b, u32 parity) {
  PTX("{ .reg .pred p; W: mbarrier.try_wait.parity.shared.b64 p, [%0], %1; @!p bra W; }"
      :: "r"(at(b)), "r"(parity) : "memory");
}
__device__ void load(void* to, const void* from, u32 bytes, u64* b) {
  PTX("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" :: "r"(at(b)), "r"(bytes) : "memory");
  PTX("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
      :: "r"(at(to)), "l"(from), "r"(bytes), "r"(at(b)) : "memory");
}
__device__ void store(void* to, const void* from, u32 bytes) {
  PTX("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
      :: "l"(to), "r"(at((void*)from)), "r"(bytes) : "memory");
  PTX("cp.async.bulk.commit_group;" ::: "memory");
}
__device__ void landed() { PTX("cp.async.bulk.wait_group 0;" ::: "memory"); }

// from: rounds of 16 words each; o: a place of 16 words for each block
extern "C" __global__ void test(const uint4* from, uint4* o, u64* wrong, int rounds) {
  __shared__ alignas(128) uint4 place[64];
  __shared__ u64 bar;
  const int t = threadIdx.x;
  uint4* mine = o + 64 * blockIdx.x;
  if (!t) { init(&bar, 1); PTX("fence.proxy.async;" ::: "memory"); }
  __syncthreads();
  u64 bad = 0;
  for (int n = 0; n < rounds; n++) {
    const u32 own = 0x9e3779b9u * (n + 1) + blockIdx.x;
    const uint4 v = {own, own + 1, own + 2, own + 3};
    FIRST
    BETWEEN
    SECOND
    __syncthreads();
    PTX("fence.proxy.async;" ::: "memory");
    __syncthreads();
  }
  atomicAdd(wrong, bad);
}
"""
BY_TMA = """
    if (!t) load(place, from + 64 * (n % 64), 1024, &bar);
    wait(&bar, n & 1);
    { const uint4 r = place[t], w = from[64 * (n % 64) + t]; bad += r.x != w.x || r.y != w.y; }"""
TO_GLOBAL = """
    if (!t) { store(mine, place, 1024); landed(); }
    __syncthreads();
    { const uint4 r = __ldcg(mine + t); bad += r.x != own + t || r.y != own + 1; }"""
STORE, STORE_MANY = (
    "place[t] = v;",
    "for (int k = 0; k < 8; k++) place[t] = make_uint4(own + k, 0, 0, 0); place[t] = v;",
)
INIT_ALONE = "if (!t) for (int k = 0; k < 128; k++) init((u64*)place + k, 7);"
INIT = "if (t < 32) for (int k = 0; k < 4; k++) init((u64*)place + 4 * t + k, 7);"
OWN_WORD = "place[t] = make_uint4(own + t, own + 1, 0, 0);"
PAIRS = {
    "store, barrier, TMA load": (STORE, "__syncthreads();", BY_TMA),
    "nine stores, barrier, TMA load": (STORE_MANY, "__syncthreads();", BY_TMA),
    "stores and TMA load in one thread": ("if (!t) for (int k = 0; k < 64; k++) place[k] = v;", "", BY_TMA),
    "mbarrier.init, barrier, TMA load": (INIT, "__syncthreads();", BY_TMA),
    "mbarrier.init and TMA load in one thread": (INIT_ALONE, "", BY_TMA),
    "store, barrier, TMA store": (OWN_WORD, "__syncthreads();", TO_GLOBAL),
    "stores and TMA store in one thread": (
        "if (!t) for (int k = 0; k < 64; k++) place[k] = make_uint4(own + k, own + 1, 0, 0);", "", TO_GLOBAL),
    "TMA store, store without a wait": (
        OWN_WORD, "PTX(\"fence.proxy.async;\" ::: \"memory\"); __syncthreads();",
        """
    if (!t) store(mine, place, 1024);
    __syncthreads();
    place[t] = make_uint4(0, 0, 0, 0);
    if (!t) landed();
    __syncthreads();
    { const uint4 r = __ldcg(mine + t); bad += r.x != own + t || r.y != own + 1; }"""),
}  # fmt: skip


def violations(pair: tuple[str, str, str], blocks: int, rounds: int) -> int:
    """Return how many of blocks · rounds · 64 words of 16 bytes did not hold what the order of the program gives."""
    text = SOURCE
    for name, part in zip(("FIRST", "BETWEEN", "SECOND"), pair, strict=True):
        text = text.replace(name, part)
    kernel = cupy.RawKernel(text, "test", options=("--std=c++17",))
    source = cupy.random.randint(0, 2**31, (64, 64, 4), dtype=cupy.int32)
    out, wrong = cupy.zeros((blocks, 64, 4), cupy.int32), cupy.zeros(1, cupy.uint64)
    kernel((blocks,), (64,), (source, out, wrong, cupy.int32(rounds)))
    return int(wrong[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=20_000, help="of each block (default: 20,000)")
    rounds = parser.parse_args().rounds
    blocks = 8 * cupy.cuda.runtime.getDeviceProperties(0)["multiProcessorCount"]
    for name, pair in PAIRS.items():
        print(f"{name:45} {violations(pair, blocks, rounds):>14,} of {blocks * rounds * 64:,}", flush=True)


if __name__ == "__main__":
    main()
