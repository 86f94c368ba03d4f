// cub::WarpReduce: the first lane has the result.
#pragma once
#include <evo_emu/cub.h>

namespace cub {

template <class T, int n = 32>
class WarpReduce {
public:
    using TempStorage = evo_emu::cub::NoStorage;
    explicit WarpReduce(TempStorage&) {}

    template <class Operation> T Reduce(T value, Operation operation, int valid, EVO_EMU_CUB_LINE) {
        value = evo_emu::cub::reduce_lanes<n>("WarpReduce", value, operation, valid, line);
        return evo_emu::lane() % n == 0 ? value : evo_emu::cub::never_set<T>();
    }
    template <class Operation> T Reduce(T value, Operation operation, EVO_EMU_CUB_LINE) {
        return Reduce(value, operation, n, line);
    }
    T Sum(T value, EVO_EMU_CUB_LINE) { return Reduce(value, cuda::std::plus<>(), n, line); }
    T Sum(T value, int valid, EVO_EMU_CUB_LINE) { return Reduce(value, cuda::std::plus<>(), valid, line); }
    T Max(T value, EVO_EMU_CUB_LINE) { return Reduce(value, cuda::maximum<>(), n, line); }
    T Min(T value, EVO_EMU_CUB_LINE) { return Reduce(value, cuda::minimum<>(), n, line); }
};

}  // namespace cub
