// cub::WarpScan: prefixes over the lanes of a logical warp.
#pragma once
#include <evo_emu/cub.h>

namespace cub {

template <class T, int n = 32>
class WarpScan {
public:
    using TempStorage = evo_emu::cub::NoStorage;
    explicit WarpScan(TempStorage&) {}

    template <class Operation> void InclusiveScan(T in, T& out, Operation operation, EVO_EMU_CUB_LINE) {
        out = evo_emu::cub::scan_lanes<n>("WarpScan", in, operation, line);
    }
    template <class Operation> void InclusiveScan(T in, T& out, Operation operation, T& whole, EVO_EMU_CUB_LINE) {
        T sum = evo_emu::cub::scan_lanes<n>("WarpScan", in, operation, line);
        whole = Broadcast(sum, n - 1, line);
        out = sum;
    }
    template <class Operation> void ExclusiveScan(T in, T& out, T initial, Operation operation, EVO_EMU_CUB_LINE) {
        T sum = evo_emu::cub::scan_lanes<n>("WarpScan", in, operation, line);
        T before = evo_emu::cub::of_lane_before<n>("WarpScan", sum, line);
        out = evo_emu::lane() % n ? operation(initial, before) : initial;
    }
    void InclusiveSum(T in, T& out, EVO_EMU_CUB_LINE) { InclusiveScan(in, out, cuda::std::plus<>(), line); }
    void InclusiveSum(T in, T& out, T& whole, EVO_EMU_CUB_LINE) {
        InclusiveScan(in, out, cuda::std::plus<>(), whole, line);
    }
    void ExclusiveSum(T in, T& out, EVO_EMU_CUB_LINE) { ExclusiveScan(in, out, T(), cuda::std::plus<>(), line); }
    T Broadcast(T value, unsigned source, EVO_EMU_CUB_LINE) {
        const unsigned from = evo_emu::lane_in_segment(int(source), n);
        return evo_emu::cub::from_lane<n>("WarpScan", value, from, line);
    }
};

}  // namespace cub
