// ---- tiles: Q, K and V in shared memory, as all threads load and read them ----
constexpr int LOADERS = THREADS;
typedef TileKV TileK, TileV;
typedef Pipeline<STAGES, TileKV::BYTES> PipelineKV;
static_assert(HEAD_DIM_V == HEAD_DIM, "tiles of K and V have one size");

struct Tiles {
    Pipeline<1, TileQ::BYTES> q;
    PipelineKV k, v;

    __device__ __forceinline__ Tiles(unsigned char* shared)
        : q{reinterpret_cast<T*>(shared)}, k{q.buffers + q.ELEMENTS}, v{k.buffers + STAGES * k.ELEMENTS} {}
};
