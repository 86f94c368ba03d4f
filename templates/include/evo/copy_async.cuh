// ---- copy_async: global to shared memory without registers (cp.async, sm_80 and later) ----
// Copies BYTES (4, 8 or 16) of which `valid` come from `from` and the rest are zeros. The data may be read after
// copy_async_wait and a barrier. 16 bytes go past L1, which nothing would read again.
template <int BYTES>
__device__ __forceinline__ void copy_async(void* to, const void* from, int valid) {
    unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(to));
    if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(valid) : "memory");
    else if constexpr (BYTES == 8)
        asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(address), "l"(from), "r"(valid) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(address), "l"(from), "r"(valid) : "memory");
}

// Closes a group of this thread's copies; an empty group is one too.
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most PENDING of this thread's latest groups are in flight.
template <int PENDING>
__device__ __forceinline__ void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
