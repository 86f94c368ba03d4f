// ---- tiles: Q, K and V in shared memory, as all threads load and read them ----
constexpr int LOADERS = THREADS;
typedef Pipeline<STAGES, TileKV::BYTES> PipelineKV;

struct Tiles {
    Pipeline<1, TileQ::BYTES> q;
    PipelineKV k, v;

    __device__ __forceinline__ Tiles(unsigned char* shared)
        : q{reinterpret_cast<T*>(shared)}, k{q.buffers + q.ELEMENTS}, v{k.buffers + STAGES * k.ELEMENTS} {}
};
