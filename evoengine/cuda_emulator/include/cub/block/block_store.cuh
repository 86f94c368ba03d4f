// cub::BlockStore: `items` in a row of each thread, or in stripes; the transposing kinds go by way of their storage.
#pragma once
#include <evo_emu/cub.h>

namespace cub {

enum BlockStoreAlgorithm {
    BLOCK_STORE_DIRECT, BLOCK_STORE_STRIPED, BLOCK_STORE_VECTORIZE, BLOCK_STORE_TRANSPOSE, BLOCK_STORE_WARP_TRANSPOSE,
    BLOCK_STORE_WARP_TRANSPOSE_TIMESLICED,
};

template <class T, int x, int items, BlockStoreAlgorithm kind = BLOCK_STORE_DIRECT, int y = 1, int z = 1>
class BlockStore {
    static constexpr int threads = x * y * z;
    static constexpr bool stored = kind == BLOCK_STORE_TRANSPOSE || kind == BLOCK_STORE_WARP_TRANSPOSE;
    struct Exchanged {
        T of_block[threads * items];
    };

public:
    using TempStorage = evo_emu::Choose<stored, Exchanged, evo_emu::cub::NoStorage>;
    BlockStore() : storage(evo_emu::shared_variable<TempStorage, 1>("BlockStore", [] {})) {}
    explicit BlockStore(TempStorage& storage) : storage(storage) {}

    template <class To> void Store(To to, T (&from)[items], EVO_EMU_CUB_LINE) {
        Store(to, from, threads * items, line);
    }
    template <class To> void Store(To to, T (&from)[items], int valid, EVO_EMU_CUB_LINE) {
        evo_emu::cub::check_threads("BlockStore", threads, line);
        const int rank = int(evo_emu::thread_rank);
        if constexpr (stored) {
            for (int i = 0; i < items; ++i) storage.of_block[rank * items + i] = from[i];
            evo_emu::cub::meet("BlockStore", line);
        }
        for (int i = 0; i < items; ++i) {
            const int at = stored || kind == BLOCK_STORE_STRIPED ? i * threads + rank : rank * items + i;
            if (at >= valid) continue;
            if constexpr (stored) to[at] = storage.of_block[at];
            else to[at] = from[i];
        }
    }

private:
    TempStorage& storage;
};

}  // namespace cub
