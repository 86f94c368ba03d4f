// mbarriers, fences, register budgets and the small change of PTX around them. See runtime/barriers.cpp.
#pragma once
#include <evo_emu/runtime.h>

namespace evo_emu {

// `_`, the result that nobody wants.
struct Ignored {
    template <class T> void operator=(const T&) const {}
};

}  // namespace evo_emu

namespace evo_emu::ptx {

EVO_PTX void mbarrier_init_shared_b64(unsigned shared, unsigned count, int line = __builtin_LINE()) {
    barrier_init(shared, count, line);
}
EVO_PTX void mbarrier_inval_shared_b64(unsigned shared, int line = __builtin_LINE()) {
    barrier_invalidate(shared, line);
}
template <class State>
EVO_PTX void mbarrier_arrive_shared_b64(State&& state, unsigned shared, unsigned count = 1,
                                        int line = __builtin_LINE()) {
    state = barrier_arrive(shared, count, 0, line);
}
template <class State>
EVO_PTX void mbarrier_arrive_shared_cluster_b64(State&&, unsigned shared, unsigned count = 1,
                                                int line = __builtin_LINE()) {
    barrier_arrive(shared, count, 0, line);
}
template <class State>
EVO_PTX void mbarrier_arrive_expect_tx_shared_b64(State&& state, unsigned shared, unsigned bytes,
                                                  int line = __builtin_LINE()) {
    state = barrier_arrive(shared, 1, bytes, line);
}
EVO_PTX void mbarrier_expect_tx_shared_b64(unsigned shared, unsigned bytes, int line = __builtin_LINE()) {
    barrier_expect(shared, bytes, line);
}
template <class P>
EVO_PTX void mbarrier_try_wait_parity_shared_b64(P& done, unsigned shared, unsigned parity, unsigned = 0,
                                                 int line = __builtin_LINE()) {
    done = barrier_try_wait(shared, parity, line);
}
template <class P>
EVO_PTX void mbarrier_test_wait_parity_shared_b64(P& done, unsigned shared, unsigned parity,
                                                  int line = __builtin_LINE()) {
    done = barrier_test_wait(shared, parity, line);
}
template <class P, class State>
EVO_PTX void mbarrier_try_wait_shared_b64(P& done, unsigned shared, State state, unsigned = 0,
                                          int line = __builtin_LINE()) {
    done = barrier_try_wait(shared, unsigned(state & 1), line);
}
template <class P, class State>
EVO_PTX void mbarrier_test_wait_shared_b64(P& done, unsigned shared, State state, int line = __builtin_LINE()) {
    done = barrier_test_wait(shared, unsigned(state & 1), line);
}
EVO_PTX void cp_async_mbarrier_arrive_shared_b64(unsigned shared, int line = __builtin_LINE()) {
    barrier_arrive_after_copies(shared, false, line);
}
EVO_PTX void cp_async_mbarrier_arrive_noinc_shared_b64(unsigned shared, int line = __builtin_LINE()) {
    barrier_arrive_after_copies(shared, true, line);
}

EVO_PTX void mapa_shared_cluster_u32(unsigned& mapped, unsigned shared, unsigned block, int line = __builtin_LINE()) {
    mapped = map_to_block(shared, block, line);
}
template <class D, class Address>
EVO_PTX void mapa_u64(D& mapped, Address generic, unsigned block, int line = __builtin_LINE()) {
    mapped = (D)map_to_block((const void*)generic, block, line);
}
EVO_PTX void barrier_cluster_arrive_release(int line = __builtin_LINE()) { cluster_arrive(line); }
EVO_PTX void barrier_cluster_arrive_relaxed(int line = __builtin_LINE()) { cluster_arrive(line, false); }
EVO_PTX void barrier_cluster_wait_acquire(int line = __builtin_LINE()) { cluster_wait(line); }

EVO_PTX void fence_mbarrier_init() { fence_barrier_inits(); }
EVO_PTX void fence_proxy_async() { fence_async_proxy(); }
EVO_PTX void fence_proxy_async_shared() { fence_async_proxy(); }

EVO_PTX void setmaxnreg_inc_sync_aligned_u32(unsigned count, int line = __builtin_LINE()) {
    change_registers(count, true, line);
}
EVO_PTX void setmaxnreg_dec_sync_aligned_u32(unsigned count, int line = __builtin_LINE()) {
    change_registers(count, false, line);
}

template <class Lane, class P>
EVO_PTX void elect_sync(Lane&& lane, P& chosen, unsigned mask, int line = __builtin_LINE()) {
    unsigned leader = elect(mask, line);
    lane = leader;
    chosen = leader == evo_emu::lane();
}

// Programmatic launch and prefetches change when things happen, not what.
EVO_PTX void griddepcontrol_wait() {}
EVO_PTX void griddepcontrol_launch_dependents() {}
template <class Address> EVO_PTX void prefetch_tensormap(Address) {}

template <class P, class T> EVO_PTX void setp_ne_b32(P& p, T a, T b) { p = a != b; }
template <class P, class T> EVO_PTX void setp_ne_s32(P& p, T a, T b) { p = a != b; }
template <class P, class T> EVO_PTX void setp_ne_u32(P& p, T a, T b) { p = a != b; }
template <class P, class T> EVO_PTX void setp_eq_b32(P& p, T a, T b) { p = a == b; }
template <class P, class T> EVO_PTX void setp_eq_s32(P& p, T a, T b) { p = a == b; }
template <class P, class T> EVO_PTX void setp_eq_u32(P& p, T a, T b) { p = a == b; }
template <class D, class A, class B> EVO_PTX void selp_b32(D& d, A a, B b, bool p) { d = p ? D(a) : D(b); }
template <class D, class A, class B> EVO_PTX void selp_s32(D& d, A a, B b, bool p) { d = p ? D(a) : D(b); }
template <class D, class A, class B> EVO_PTX void selp_u32(D& d, A a, B b, bool p) { d = p ? D(a) : D(b); }
template <class D, class A> EVO_PTX void mov_b32(D& d, A a) { d = D(a); }
template <class D, class A> EVO_PTX void mov_s32(D& d, A a) { d = D(a); }
template <class D, class A> EVO_PTX void mov_u32(D& d, A a) { d = D(a); }
template <class D, class A> EVO_PTX void mov_b64(D& d, A a) { d = D(a); }
template <class D, class A> EVO_PTX void mov_u64(D& d, A a) { d = D(a); }

}  // namespace evo_emu::ptx
