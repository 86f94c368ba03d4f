// ---- bulk_add: floats from shared memory added to those in global memory by the copy engine (sm_90) ----
{% if wgmma_n is not defined %}
__device__ __forceinline__ void async_proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

{% endif %}
// By one thread, which must wait before it ends; `bytes` and both addresses are multiples of 16. The stores of all threads
// that wrote there must be fenced first (async_proxy_fence, then a barrier). Other blocks may add to the same place.
__device__ __forceinline__ void bulk_add(float* to, unsigned from, unsigned bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(from),
                 "r"(bytes)
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Until all that this thread added has been read, so that it may be overwritten.
__device__ __forceinline__ void bulk_add_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

// Until it has been added.
__device__ __forceinline__ void bulk_add_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
