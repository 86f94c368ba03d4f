// cub::BlockScan: prefixes over the threads of a block, in order of their rank, whichever the algorithm.
#pragma once
#include <evo_emu/cub.h>

namespace cub {

enum BlockScanAlgorithm { BLOCK_SCAN_RAKING, BLOCK_SCAN_RAKING_MEMOIZE, BLOCK_SCAN_WARP_SCANS };

template <class T, int x, BlockScanAlgorithm = BLOCK_SCAN_RAKING, int y = 1, int z = 1>
class BlockScan {
    static constexpr int threads = x * y * z, warps = (threads + 31) / 32;
    using Line = evo_emu::cub::Line;

public:
    struct TempStorage {
        T of_warps[warps];
    };
    BlockScan() : storage(evo_emu::shared_variable<TempStorage, 1>("BlockScan", [] {})) {}
    explicit BlockScan(TempStorage& storage) : storage(storage) {}

    template <class Operation> void InclusiveScan(T in, T& out, Operation operation, T& whole, EVO_EMU_CUB_LINE) {
        out = scan(in, operation, whole, line).upto;
    }
    template <class Operation> void InclusiveScan(T in, T& out, Operation operation, EVO_EMU_CUB_LINE) {
        T whole;
        InclusiveScan(in, out, operation, whole, line);
    }
    template <class Operation>
    void ExclusiveScan(T in, T& out, T initial, Operation operation, T& whole, EVO_EMU_CUB_LINE) {
        const Prefixes found = scan(in, operation, whole, line);
        out = evo_emu::thread_rank ? operation(initial, found.before) : initial;
    }
    template <class Operation> void ExclusiveScan(T in, T& out, T initial, Operation operation, EVO_EMU_CUB_LINE) {
        T whole;
        ExclusiveScan(in, out, initial, operation, whole, line);
    }
    template <int items, class Operation>
    void InclusiveScan(T (&in)[items], T (&out)[items], Operation operation, T& whole, EVO_EMU_CUB_LINE) {
        T own[items] = {in[0]};
        for (int i = 1; i < items; ++i) own[i] = operation(own[i - 1], in[i]);
        const Prefixes found = scan(own[items - 1], operation, whole, line);
        for (int i = 0; i < items; ++i) out[i] = evo_emu::thread_rank ? operation(found.before, own[i]) : own[i];
    }
    template <int items, class Operation>
    void ExclusiveScan(T (&in)[items], T (&out)[items], T initial, Operation operation, T& whole, EVO_EMU_CUB_LINE) {
        T own = in[0];
        for (int i = 1; i < items; ++i) own = operation(own, in[i]);
        const Prefixes found = scan(own, operation, whole, line);
        T before = evo_emu::thread_rank ? operation(initial, found.before) : initial;
        for (int i = 0; i < items; ++i) {
            T next = operation(before, in[i]);
            out[i] = before;
            before = next;
        }
    }
    // Of one value a thread or of an array of them.
    template <class Values> void InclusiveSum(Values& in, Values& out, T& whole, EVO_EMU_CUB_LINE) {
        InclusiveScan(in, out, cuda::std::plus<>(), whole, line);
    }
    template <class Values> void InclusiveSum(Values& in, Values& out, EVO_EMU_CUB_LINE) {
        T whole;
        InclusiveScan(in, out, cuda::std::plus<>(), whole, line);
    }
    template <class Values> void ExclusiveSum(Values& in, Values& out, T& whole, EVO_EMU_CUB_LINE) {
        ExclusiveScan(in, out, T(), cuda::std::plus<>(), whole, line);
    }
    template <class Values> void ExclusiveSum(Values& in, Values& out, EVO_EMU_CUB_LINE) {
        T whole;
        ExclusiveScan(in, out, T(), cuda::std::plus<>(), whole, line);
    }
    void InclusiveSum(const T& in, T& out, EVO_EMU_CUB_LINE) { InclusiveScan(in, out, cuda::std::plus<>(), line); }
    void ExclusiveSum(const T& in, T& out, EVO_EMU_CUB_LINE) { ExclusiveScan(in, out, T(), cuda::std::plus<>(), line); }

private:
    struct Prefixes {
        T before, upto;  // `before` of the first thread is never set
    };
    TempStorage& storage;

    template <class Operation> Prefixes scan(T value, Operation operation, T& whole, Line line) {
        evo_emu::cub::check_threads("BlockScan", threads, line);
        const int rank = int(evo_emu::thread_rank), warp = rank / 32;
        T upto = evo_emu::cub::scan_lanes<32>("BlockScan", value, operation, line);
        T before = evo_emu::cub::of_lane_before<32>("BlockScan", upto, line);
        if (rank % 32 == 31 || rank == threads - 1) storage.of_warps[warp] = upto;
        evo_emu::cub::meet("BlockScan", line);
        T of_warps_before = storage.of_warps[0];
        for (int other = 1; other < warp; ++other)
            of_warps_before = operation(of_warps_before, storage.of_warps[other]);
        whole = storage.of_warps[0];
        for (int other = 1; other < warps; ++other) whole = operation(whole, storage.of_warps[other]);
        if (warp) upto = operation(of_warps_before, upto);
        if (warp) before = rank % 32 ? operation(of_warps_before, before) : of_warps_before;
        return {rank ? before : evo_emu::cub::never_set<T>(), upto};
    }
};

}  // namespace cub
