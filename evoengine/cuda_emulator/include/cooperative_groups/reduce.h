// Reductions over a tile: every thread gets the result.
#pragma once
#include <cooperative_groups.h>

namespace cooperative_groups {

template <class T> struct plus { T operator()(T a, T b) const { return a + b; } };
template <class T> struct less { T operator()(T a, T b) const { return b < a ? b : a; } };
template <class T> struct greater { T operator()(T a, T b) const { return a < b ? b : a; } };
template <class T> struct bit_and { T operator()(T a, T b) const { return a & b; } };
template <class T> struct bit_or { T operator()(T a, T b) const { return a | b; } };
template <class T> struct bit_xor { T operator()(T a, T b) const { return a ^ b; } };

template <unsigned n, class Parent, class T, class Operation>
inline T reduce(const thread_block_tile<n, Parent>& tile, T value, Operation operation, EVO_EMU_LINE) {
    for (unsigned across = n / 2; across; across /= 2)
        value = operation(value, details::moved("cg::reduce", line, tile.mask(), value,
                                                evo_emu::lane_across(int(across), n)));
    return value;
}
template <class T, class Operation> inline T reduce(const coalesced_group&, T value, Operation) { return value; }

}  // namespace cooperative_groups
