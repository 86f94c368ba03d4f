// cub::BlockLoad: `items` in a row for each thread, or in stripes; the transposing kinds go by way of their storage.
#pragma once
#include <evo_emu/cub.h>

namespace cub {

enum BlockLoadAlgorithm {
    BLOCK_LOAD_DIRECT, BLOCK_LOAD_STRIPED, BLOCK_LOAD_VECTORIZE, BLOCK_LOAD_TRANSPOSE, BLOCK_LOAD_WARP_TRANSPOSE,
    BLOCK_LOAD_WARP_TRANSPOSE_TIMESLICED,
};

template <class T, int x, int items, BlockLoadAlgorithm kind = BLOCK_LOAD_DIRECT, int y = 1, int z = 1>
class BlockLoad {
    static constexpr int threads = x * y * z;
    static constexpr bool stored = kind == BLOCK_LOAD_TRANSPOSE || kind == BLOCK_LOAD_WARP_TRANSPOSE;
    struct Exchanged {
        T of_block[threads * items];
    };

public:
    using TempStorage = evo_emu::Choose<stored, Exchanged, evo_emu::cub::NoStorage>;
    BlockLoad() : storage(evo_emu::shared_variable<TempStorage, 1>("BlockLoad", [] {})) {}
    explicit BlockLoad(TempStorage& storage) : storage(storage) {}

    template <class From> void Load(From from, T (&to)[items], EVO_EMU_CUB_LINE) {
        load(from, to, threads * items, nullptr, line);
    }
    template <class From> void Load(From from, T (&to)[items], int valid, EVO_EMU_CUB_LINE) {
        load(from, to, valid, nullptr, line);
    }
    template <class From, class Default>
    void Load(From from, T (&to)[items], int valid, Default otherwise, EVO_EMU_CUB_LINE) {
        const T value = T(otherwise);
        load(from, to, valid, &value, line);
    }

private:
    TempStorage& storage;

    template <class From> void load(From from, T (&to)[items], int valid, const T* otherwise, evo_emu::cub::Line line) {
        evo_emu::cub::check_threads("BlockLoad", threads, line);
        const int rank = int(evo_emu::thread_rank);
        auto put = [&](T& place, int at) {
            if (at < valid) place = from[at];
            else if (otherwise) place = *otherwise;
        };
        if constexpr (stored) {
            for (int i = 0; i < items; ++i) put(storage.of_block[i * threads + rank], i * threads + rank);
            evo_emu::cub::meet("BlockLoad", line);
        }
        for (int i = 0; i < items; ++i) {
            const int at = kind == BLOCK_LOAD_STRIPED ? i * threads + rank : rank * items + i;
            if constexpr (!stored) put(to[i], at);
            else if (at < valid || otherwise) to[i] = storage.of_block[at];
        }
    }
};

}  // namespace cub
