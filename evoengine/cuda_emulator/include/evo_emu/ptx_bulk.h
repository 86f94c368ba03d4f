// Bulk asynchronous copies: plain, and of tiles of tensors, whose number of dimensions becomes the template argument.
// See runtime/bulk.cpp.
#pragma once
#include <evo_emu/runtime.h>

namespace evo_emu::ptx {

template <class Address>
EVO_PTX void cp_async_bulk_shared_cluster_global_mbarrier_complete_tx_bytes(unsigned shared, Address global,
                                                                            unsigned bytes, unsigned barrier,
                                                                            unsigned long long = 0,
                                                                            int line = __builtin_LINE()) {
    bulk_load(shared, (const void*)global, bytes, barrier, line);
}
template <class Address>
EVO_PTX void cp_async_bulk_global_shared_bulk_group(Address global, unsigned shared, unsigned bytes,
                                                    unsigned long long = 0, int line = __builtin_LINE()) {
    bulk_store((void*)global, shared, bytes, line);
}

template <class Address>
EVO_PTX void cp_reduce_async_bulk_global_shared_bulk_group_add_f32(Address global, unsigned shared, unsigned bytes,
                                                                   unsigned long long = 0,
                                                                   int line = __builtin_LINE()) {
    bulk_add((void*)global, shared, bytes, line);
}

template <unsigned dims, class Address>
EVO_PTX void cp_async_bulk_tensor_shared_cluster_global_mbarrier_complete_tx_bytes(unsigned shared, Address map,
                                                                                   Coordinates<dims> at,
                                                                                   unsigned barrier,
                                                                                   unsigned long long = 0,
                                                                                   int line = __builtin_LINE()) {
    tile_load(shared, (const void*)map, at.of, dims, barrier, 1u << cluster_rank(), line);
}
template <unsigned dims, class Address>
EVO_PTX void cp_async_bulk_tensor_shared_cluster_global_mbarrier_complete_tx_bytes_multicast_cluster(
    unsigned shared, Address map, Coordinates<dims> at, unsigned barrier, unsigned short blocks,
    unsigned long long = 0, int line = __builtin_LINE()) {
    tile_load(shared, (const void*)map, at.of, dims, barrier, blocks, line);
}
template <unsigned dims, class Address>
EVO_PTX void cp_async_bulk_tensor_global_shared_bulk_group(Address map, Coordinates<dims> at, unsigned shared,
                                                           unsigned long long = 0, int line = __builtin_LINE()) {
    tile_store((const void*)map, at.of, dims, shared, line);
}

EVO_PTX void cp_async_bulk_commit_group() { bulk_commit(); }
EVO_PTX void cp_async_bulk_wait_group_read(unsigned groups_left) { bulk_wait(groups_left, true); }
EVO_PTX void cp_async_bulk_wait_group(unsigned groups_left) { bulk_wait(groups_left, false); }

}  // namespace evo_emu::ptx
