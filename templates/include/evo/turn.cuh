// ---- turn: two warpgroups that take turns at the tensor cores, one at its products while the other is at all else ----
// The first begins; whoever ends its turn lets the other one begin. Without PING_PONG nobody waits. Named barriers 1 and
// 2, at which 128 threads arrive and 128 wait. Include before: barrier.
template <bool PING_PONG>
struct Turn {
    int own, other;

    __device__ __forceinline__ Turn(int warpgroup) : own(1 + warpgroup), other(2 - warpgroup) {
        if (warpgroup == 1) end();  // the turn before the first, that nobody has
    }
    __device__ __forceinline__ void begin() const {
        if (PING_PONG) named_barrier_sync(own, 256);
    }
    __device__ __forceinline__ void end() const {
        if (PING_PONG) named_barrier_arrive(other, 256);
    }
    // Takes the turn behind the last, so that no arrival is left.
    __device__ __forceinline__ void finish(bool is_next) const {
        if (is_next) begin();
    }
};
