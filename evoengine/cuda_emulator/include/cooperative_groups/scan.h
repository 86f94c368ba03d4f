// Prefix sums over a tile, by any associative operation.
#pragma once
#include <cooperative_groups/reduce.h>

namespace cooperative_groups {

template <unsigned n, class Parent, class T, class Operation = plus<T>>
inline T inclusive_scan(const thread_block_tile<n, Parent>& tile, T value, Operation operation = {}, EVO_EMU_LINE) {
    for (unsigned below = 1; below < n; below *= 2) {
        T other = details::moved("cg::scan", line, tile.mask(), value, evo_emu::lane_above(below, n));
        if (tile.thread_rank() >= below) value = operation(other, value);
    }
    return value;
}
// The first thread gets T(), as the real one does for a sum.
template <unsigned n, class Parent, class T, class Operation = plus<T>>
inline T exclusive_scan(const thread_block_tile<n, Parent>& tile, T value, Operation operation = {}, EVO_EMU_LINE) {
    T whole = inclusive_scan(tile, value, operation, line);
    T before = details::moved("cg::exclusive_scan", line, tile.mask(), whole, evo_emu::lane_above(1, n));
    return tile.thread_rank() ? before : T();
}

}  // namespace cooperative_groups
