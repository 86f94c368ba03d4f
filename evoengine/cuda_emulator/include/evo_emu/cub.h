// What the primitives of CUB share. Where CUB leaves a result to one thread alone, the others get what was never set.
//
// A block's storage is no larger than CUB's own, as kernels may place it themselves, and threads go on in any order
// behind the one barrier that CUB has there: so storage that is used again without __syncthreads shows.
#pragma once
#include <cooperative_groups.h>
#include <cuda/functional>

namespace evo_emu {

template <bool first, class A, class B> struct Choice { using type = A; };
template <class A, class B> struct Choice<false, A, B> { using type = B; };
template <bool first, class A, class B> using Choose = typename Choice<first, A, B>::type;

}  // namespace evo_emu

namespace evo_emu::cub {

// A type of its own: CUB's parameters are whole numbers as well.
struct Line {
    int number;
    explicit Line(int number) : number(number) {}
};
#define EVO_EMU_CUB_LINE evo_emu::cub::Line line = evo_emu::cub::Line(__builtin_LINE())

struct NoStorage {};

template <class T> inline T never_set() {
    T value;
    poison(value);
    return value;
}

template <int n, class T> inline T from_lane(const char* name, T value, unsigned source, Line line) {
    static_assert(n > 0 && n <= 32 && (n & (n - 1)) == 0,
                  "the emulator knows logical warps of 1, 2, 4, 8, 16 or 32 threads");
    const unsigned mask = cooperative_groups::thread_block_tile<n>::mask();
    return cooperative_groups::details::moved(name, line.number, mask, value, source);
}

// Over the first `valid` of n threads in a row; the first one's is the result.
template <int n, class T, class Operation>
inline T reduce_lanes(const char* name, T value, Operation operation, int valid, Line line) {
    const int rank = int(lane() & (n - 1));
    for (int below = 1; below < n; below *= 2) {
        T other = from_lane<n>(name, value, lane_below(unsigned(below), n), line);
        if (rank % (2 * below) == 0 && rank + below < valid) value = operation(value, other);
    }
    return value;
}

template <int n, class T, class Operation>
inline T scan_lanes(const char* name, T value, Operation operation, Line line) {
    const int rank = int(lane() & (n - 1));
    for (int above = 1; above < n; above *= 2) {
        T other = from_lane<n>(name, value, lane_above(unsigned(above), n), line);
        if (rank >= above) value = operation(other, value);
    }
    return value;
}

template <int n, class T> inline T of_lane_before(const char* name, T value, Line line) {
    return from_lane<n>(name, value, lane_above(1, n), line);
}

inline void meet(const char* name, Line line) {
    block_barrier(name, line.number, 0, Vote::none);
    yield();
}

inline void check_threads(const char* name, int threads, Line line) {
    if (unsigned(threads) != blockDim.x * blockDim.y * blockDim.z)
        crash("%s at line %d is for blocks of %d threads, this one has %u", name, line.number, threads,
              blockDim.x * blockDim.y * blockDim.z);
}

}  // namespace evo_emu::cub
