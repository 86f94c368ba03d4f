// VECTOR neighbours, moved by one load or store; their address is a multiple of their size.
struct alignas(VECTOR * sizeof(T)) Run {
    T element[VECTOR];
};

__device__ __forceinline__ Run read_run(const T* from) { return *reinterpret_cast<const Run*>(from); }
__device__ __forceinline__ void write_run(T* to, const Run& run) { *reinterpret_cast<Run*>(to) = run; }
