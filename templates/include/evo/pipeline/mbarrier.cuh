// ---- pipeline: STAGES buffers that producers fill and consumers read, each with a barrier for full and for empty ----
// Tiles are counted from 0 by both sides alike, and tile i lies in buffer i % STAGES.
template <int STAGES, int BYTES>
struct Pipeline {
    static constexpr int BARRIER_BYTES = 16 * STAGES;
    unsigned char* buffers;
    unsigned full, empty;  // the first of STAGES barriers each
    unsigned before;       // tiles that passed through before tile 0

    __device__ __forceinline__ Pipeline(unsigned char* buffers_, unsigned barriers)
        : buffers(buffers_), full(barriers), empty(barriers + 8 * STAGES), before(0) {}

    // By one thread, before barrier_init_fence: `arrivals` of producers fill a buffer, `releases` of consumers empty it.
    __device__ __forceinline__ void init(int arrivals, int releases) const {
        for (int i = 0; i < STAGES; ++i) barrier_init(full + 8 * i, arrivals), barrier_init(empty + 8 * i, releases);
    }

    __device__ __forceinline__ unsigned stage(int i) const { return (before + i) % STAGES; }
    __device__ __forceinline__ unsigned phase(int i) const { return (before + i) / STAGES; }
    __device__ __forceinline__ unsigned char* tile(int i) const { return buffers + stage(i) * BYTES; }
    __device__ __forceinline__ unsigned full_of(int i) const { return full + stage(i) * 8; }
    __device__ __forceinline__ unsigned empty_of(int i) const { return empty + stage(i) * 8; }

    // Producer: until the buffer is empty. In the first phase it is: the phase before the first counts as over.
    __device__ __forceinline__ void acquire(int i) const { barrier_wait(empty_of(i), phase(i) % 2 ^ 1); }
    // Producer, by TMA: announces the bytes that full_of(i) waits for.
    __device__ __forceinline__ void commit(int i, unsigned bytes = BYTES) const { barrier_arrive_expect(full_of(i), bytes); }
    // Consumer: until the buffer is full.
    __device__ __forceinline__ void wait(int i) const { barrier_wait(full_of(i), phase(i) % 2); }
    // Consumer: each warp for itself, when it has done with the buffer.
    __device__ __forceinline__ void release(int i) const {
        if (lane() == 0) barrier_arrive(empty_of(i));
    }

    // On to other tiles, counted from 0 again: the barriers' phases go on where they are.
    __device__ __forceinline__ void advance(int tiles) { before += tiles; }
};
