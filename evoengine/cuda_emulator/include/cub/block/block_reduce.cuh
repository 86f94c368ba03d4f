// cub::BlockReduce: the first thread has the result, whichever the algorithm.
#pragma once
#include <evo_emu/cub.h>

namespace cub {

enum BlockReduceAlgorithm {
    BLOCK_REDUCE_RAKING_COMMUTATIVE_ONLY, BLOCK_REDUCE_RAKING, BLOCK_REDUCE_WARP_REDUCTIONS,
};

template <class T, int x, BlockReduceAlgorithm = BLOCK_REDUCE_WARP_REDUCTIONS, int y = 1, int z = 1>
class BlockReduce {
    static constexpr int threads = x * y * z, warps = (threads + 31) / 32;

public:
    struct TempStorage {
        T of_warps[warps];
    };
    BlockReduce() : storage(evo_emu::shared_variable<TempStorage, 1>("BlockReduce", [] {})) {}
    explicit BlockReduce(TempStorage& storage) : storage(storage) {}

    template <class Operation> T Reduce(T value, Operation operation, int valid, EVO_EMU_CUB_LINE) {
        evo_emu::cub::check_threads("BlockReduce", threads, line);
        const int rank = int(evo_emu::thread_rank), warp = rank / 32;
        value = evo_emu::cub::reduce_lanes<32>("BlockReduce", value, operation, valid - warp * 32, line);
        if (rank % 32 == 0) storage.of_warps[warp] = value;
        evo_emu::cub::meet("BlockReduce", line);
        if (rank) return evo_emu::cub::never_set<T>();
        for (int other = 1; other * 32 < valid; ++other) value = operation(value, storage.of_warps[other]);
        return value;
    }
    template <class Operation> T Reduce(T value, Operation operation, EVO_EMU_CUB_LINE) {
        return Reduce(value, operation, threads, line);
    }
    template <int items, class Operation> T Reduce(T (&values)[items], Operation operation, EVO_EMU_CUB_LINE) {
        T own = values[0];
        for (int i = 1; i < items; ++i) own = operation(own, values[i]);
        return Reduce(own, operation, threads, line);
    }
    T Sum(T value, EVO_EMU_CUB_LINE) { return Reduce(value, cuda::std::plus<>(), threads, line); }
    T Sum(T value, int valid, EVO_EMU_CUB_LINE) { return Reduce(value, cuda::std::plus<>(), valid, line); }
    template <int items> T Sum(T (&values)[items], EVO_EMU_CUB_LINE) {
        return Reduce(values, cuda::std::plus<>(), line);
    }

private:
    TempStorage& storage;
};

}  // namespace cub
