// ---- pipeline: STAGES buffers that producers fill and consumers empty, with barriers for full and for empty ----
// Tiles are counted from 0 by both sides alike, and tile i lies in buffer i % STAGES. BY_TMA: one thread fills a buffer
// by TMA, which counts the bytes; else each thread of a warpgroup, by cp.async. MULTICAST: TMA of each of a cluster's
// blocks fills its part of the buffers of all of them. Include before: barrier, cluster, thread.
template <int STAGES, int BYTES, bool BY_TMA = true, bool MULTICAST = false>
struct Pipeline {
    static constexpr int BARRIER_BYTES = 16 * STAGES;
    unsigned char* buffers;
    unsigned full, empty;  // the first of STAGES barriers each
    unsigned before;       // tiles that passed through before tile 0

    __device__ __forceinline__ Pipeline(unsigned char* buffers_, unsigned barriers)
        : buffers(buffers_), full(barriers), empty(barriers + 8 * STAGES), before(0) {}

    // By one thread, before barrier_init_fence. Each warp that reads a buffer releases it. `announcing`: threads with TMA as well.
    __device__ __forceinline__ void init(int consumer_warps, int announcing = 0) const {
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(full + 8 * i, (BY_TMA ? 1 : 128) + announcing);
            barrier_init(empty + 8 * i, MULTICAST ? CLUSTER * consumer_warps : consumer_warps);
        }
    }

    __device__ __forceinline__ unsigned stage(int i) const { return (before + i) % STAGES; }
    __device__ __forceinline__ unsigned phase(int i) const { return (before + i) / STAGES; }
    __device__ __forceinline__ unsigned char* tile(int i) const { return buffers + stage(i) * BYTES; }
    __device__ __forceinline__ unsigned full_of(int i) const { return full + stage(i) * 8; }
    __device__ __forceinline__ unsigned empty_of(int i) const { return empty + stage(i) * 8; }

    // Producer: until the buffer is empty, which it is in the first phase: the one before counts as over. TMA, which is
    // to count its bytes at full_of(i), is announced here.
    __device__ __forceinline__ void acquire(int i) const {
        barrier_wait(empty_of(i), phase(i) % 2 ^ 1);
        if (BY_TMA) arrive_expect_tx(full_of(i), BYTES);
    }
    // Producer, last: no block of the cluster will reach these barriers any more.
    __device__ __forceinline__ void drain() const {
#pragma unroll 1
        for (int i = 0; i < STAGES; ++i) barrier_wait(empty_of(i), phase(i) % 2 ^ 1);
    }
    // Producer: the buffer is full once what this thread has begun has landed.
    __device__ __forceinline__ void commit(int i) const {
        if (!BY_TMA) copy_async_arrive(full_of(i));
    }
    // Consumer: until the buffer is full. cp.async writes as ordinary stores do, wgmma reads through the asynchronous
    // proxy: hence the fence.
    __device__ __forceinline__ void wait(int i) const {
        barrier_wait(full_of(i), phase(i) % 2);
        if (!BY_TMA) async_proxy_fence();
    }
    // Consumer: each warp for itself, when all its lanes have done with the buffer.
    __device__ __forceinline__ void release(int i) const {
        if (MULTICAST) {
            if (lane() < CLUSTER) barrier_arrive_at(lane(), empty_of(i));
        } else {
            if (lane() == 0) barrier_arrive(empty_of(i));
        }
    }

    // On to other tiles, counted from 0 again: the barriers' phases go on where they are.
    __device__ __forceinline__ void advance(int tiles) { before += tiles; }
};
