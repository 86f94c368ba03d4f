// ---- pipeline: STAGES buffers that all threads fill by cp.async and all read ----
// Tiles are counted from 0, and tile i lies in buffer i % STAGES. A group of copies is committed for every tile, an
// empty one behind the last, so that counting groups is counting tiles.
template <int STAGES, int BYTES>
struct Pipeline {
    static constexpr int ELEMENTS = BYTES / sizeof(T);
    T* buffers;

    __device__ __forceinline__ T* tile(int i) const { return buffers + i % STAGES * ELEMENTS; }
};

// Until all but the latest PENDING groups have landed, for all threads; they are then also done with whatever they read
// before, so that its buffer may be filled again.
template <int PENDING>
__device__ __forceinline__ void pipeline_wait() {
    copy_async_wait<PENDING>();
    __syncthreads();
}

__device__ __forceinline__ void pipeline_commit() { copy_async_commit(); }
