// ---- pipeline: STAGES buffers that all threads fill by cp.async and all read ----
// Tiles are counted from 0, and tile i lies in buffer i % STAGES. All threads commit one group per tile, empty behind
// the last, so that counting groups is counting tiles. The barrier of a wait also says that all threads are done with
// the tile before, whose buffer is then free.
template <int STAGES, int BYTES>
struct Pipeline {
    unsigned char* buffers;

    __device__ __forceinline__ T* tile(int i) const { return reinterpret_cast<T*>(buffers + i % STAGES * BYTES); }

    __device__ __forceinline__ void commit() const { copy_async_commit(); }

    // Until all but the latest PENDING groups have landed, for all threads.
    template <int PENDING>
    __device__ __forceinline__ void wait() const {
        copy_async_wait<PENDING>();
        __syncthreads();
    }
};
