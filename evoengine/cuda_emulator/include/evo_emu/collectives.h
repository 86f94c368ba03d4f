// Barriers, shuffles, votes and reductions. A collective is met when every lane of its mask has arrived at it on the
// same source line; lanes that have ended count as not arriving, stricter than the hardware on purpose.
#pragma once
#include <evo_emu/runtime.h>

#define EVO_EMU_LINE int line = __builtin_LINE()

inline void __syncthreads(EVO_EMU_LINE) {
    evo_emu::block_barrier("__syncthreads", line, 0, evo_emu::Vote::none);
}
inline int __syncthreads_count(int predicate, EVO_EMU_LINE) {
    return evo_emu::block_barrier("__syncthreads_count", line, predicate, evo_emu::Vote::count);
}
inline int __syncthreads_and(int predicate, EVO_EMU_LINE) {
    return evo_emu::block_barrier("__syncthreads_and", line, predicate, evo_emu::Vote::conjunction);
}
inline int __syncthreads_or(int predicate, EVO_EMU_LINE) {
    return evo_emu::block_barrier("__syncthreads_or", line, predicate, evo_emu::Vote::disjunction);
}
inline void __syncwarp(unsigned mask = 0xffffffffu, EVO_EMU_LINE) {
    evo_emu::warp_rendezvous("__syncwarp", line, mask, nullptr, nullptr, true);
}
inline void __threadfence(EVO_EMU_LINE) { evo_emu::fence(evo_emu::Scope::device, line); }
inline void __threadfence_block(EVO_EMU_LINE) { evo_emu::fence(evo_emu::Scope::block, line); }
inline void __threadfence_system(EVO_EMU_LINE) { evo_emu::fence(evo_emu::Scope::device, line); }
inline void __nanosleep(unsigned) { evo_emu::yield(); }

// Any set that holds the caller is a legal answer, so the least helpful one is given: a kernel that takes it for the
// mask of its warp is wrong on hardware as well.
inline unsigned __activemask() { return 1u << evo_emu::lane(); }

namespace evo_emu {

struct Exchange {
    unsigned long long value;
    unsigned long long result;
    unsigned source;
};

// A lane that reads from one outside the mask gets all ones, which is NaN in every floating type.
inline void shuffle(void* const* payloads, unsigned mask) {
    for (unsigned lane = 0; lane < 32; ++lane) {
        if (!(mask >> lane & 1)) continue;
        auto* own = static_cast<Exchange*>(payloads[lane]);
        own->result = mask >> own->source & 1 ? static_cast<Exchange*>(payloads[own->source])->value : ~0ull;
    }
}

inline void ballot(void* const* payloads, unsigned mask) {
    unsigned set = 0;
    for (unsigned lane = 0; lane < 32; ++lane)
        if (mask >> lane & 1 && static_cast<Exchange*>(payloads[lane])->value) set |= 1u << lane;
    for (unsigned lane = 0; lane < 32; ++lane)
        if (mask >> lane & 1) static_cast<Exchange*>(payloads[lane])->result = set;
}

inline void match(void* const* payloads, unsigned mask) {
    for (unsigned lane = 0; lane < 32; ++lane) {
        if (!(mask >> lane & 1)) continue;
        auto* own = static_cast<Exchange*>(payloads[lane]);
        own->result = 0;
        for (unsigned other = 0; other < 32; ++other)
            if (mask >> other & 1 && static_cast<Exchange*>(payloads[other])->value == own->value)
                own->result |= 1u << other;
    }
}

template <class T, T (*operation)(T, T)>
void reduce(void* const* payloads, unsigned mask) {
    T total{};
    bool first = true;
    for (unsigned lane = 0; lane < 32; ++lane) {
        if (!(mask >> lane & 1)) continue;
        T value = T(static_cast<Exchange*>(payloads[lane])->value);
        total = first ? value : operation(total, value);
        first = false;
    }
    for (unsigned lane = 0; lane < 32; ++lane)
        if (mask >> lane & 1) static_cast<Exchange*>(payloads[lane])->result = (unsigned long long)total;
}

template <class T>
T exchange(const char* name, int line, unsigned mask, T value, unsigned source, Combine combine = shuffle) {
    static_assert(sizeof(T) <= sizeof(unsigned long long), "a collective carries at most 8 bytes per lane");
    Exchange payload{0, 0, source};
    __builtin_memcpy(&payload.value, &value, sizeof(T));
    warp_rendezvous(name, line, mask, &payload, combine);
    __builtin_memcpy(&value, &payload.result, sizeof(T));
    return value;
}

inline unsigned vote(const char* name, int line, unsigned mask, bool predicate) {
    return unsigned(exchange<unsigned long long>(name, line, mask, predicate, 0, ballot));
}

template <class T> inline T voted(int line, T result) {
    visit(Visit::vote, (unsigned long)line, result != 0);
    return result;
}

// Source lanes as the PTX ISA defines them for shfl.sync: within segments of `width` lanes; where the source would
// leave the segment a lane reads itself.
inline unsigned lane_in_segment(int source, int width) {
    unsigned lane = evo_emu::lane();
    return (lane & ~unsigned(width - 1)) | (unsigned(source) & unsigned(width - 1));
}
inline unsigned lane_above(unsigned delta, int width) {
    unsigned lane = evo_emu::lane(), within = lane & unsigned(width - 1);
    return delta > within ? lane : lane - delta;
}
inline unsigned lane_below(unsigned delta, int width) {
    unsigned lane = evo_emu::lane(), within = lane & unsigned(width - 1);
    return within + delta >= unsigned(width) ? lane : lane + delta;
}
inline unsigned lane_across(int mask, int width) {
    unsigned lane = evo_emu::lane(), source = lane ^ unsigned(mask);
    return source > (lane | unsigned(width - 1)) ? lane : source & 31;
}

}  // namespace evo_emu

template <class T>
inline T __shfl_sync(unsigned mask, T value, int source, int width = 32, EVO_EMU_LINE) {
    return evo_emu::exchange("__shfl_sync", line, mask, value, evo_emu::lane_in_segment(source, width));
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, EVO_EMU_LINE) {
    return evo_emu::exchange("__shfl_up_sync", line, mask, value, evo_emu::lane_above(delta, width));
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, EVO_EMU_LINE) {
    return evo_emu::exchange("__shfl_down_sync", line, mask, value, evo_emu::lane_below(delta, width));
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int across, int width = 32, EVO_EMU_LINE) {
    return evo_emu::exchange("__shfl_xor_sync", line, mask, value, evo_emu::lane_across(across, width));
}
inline unsigned __ballot_sync(unsigned mask, int predicate, EVO_EMU_LINE) {
    return evo_emu::voted(line, evo_emu::vote("__ballot_sync", line, mask, predicate));
}
inline int __any_sync(unsigned mask, int predicate, EVO_EMU_LINE) {
    return evo_emu::voted(line, evo_emu::vote("__any_sync", line, mask, predicate) != 0);
}
inline int __all_sync(unsigned mask, int predicate, EVO_EMU_LINE) {
    return evo_emu::voted(line, evo_emu::vote("__all_sync", line, mask, !predicate) == 0);
}
template <class T>
inline unsigned __match_any_sync(unsigned mask, T value, EVO_EMU_LINE) {
    unsigned long long bits = 0;
    __builtin_memcpy(&bits, &value, sizeof(T));
    return unsigned(evo_emu::exchange("__match_any_sync", line, mask, bits, 0, evo_emu::match));
}
template <class T>
inline unsigned __match_all_sync(unsigned mask, T value, int* all, EVO_EMU_LINE) {
    unsigned long long bits = 0;
    __builtin_memcpy(&bits, &value, sizeof(T));
    const unsigned equal = unsigned(evo_emu::exchange("__match_all_sync", line, mask, bits, 0, evo_emu::match));
    const unsigned present = evo_emu::vote("__match_all_sync", line, mask, true);
    *all = equal == present;
    return *all ? mask : 0;
}

#define EVO_EMU_REDUCTION(name, T, expression)                                                              \
    inline T evo_emu_##name(T a, T b) { return expression; }                                                \
    inline T __reduce_##name##_sync(unsigned mask, T value, EVO_EMU_LINE) {                                 \
        return evo_emu::voted(line, evo_emu::exchange("__reduce_" #name "_sync", line, mask, value, 0,      \
                                                      evo_emu::reduce<T, evo_emu_##name>));                 \
    }
EVO_EMU_REDUCTION(add, unsigned, a + b)
EVO_EMU_REDUCTION(add, int, int(unsigned(a) + unsigned(b)))
EVO_EMU_REDUCTION(max, unsigned, a > b ? a : b)
EVO_EMU_REDUCTION(max, int, a > b ? a : b)
EVO_EMU_REDUCTION(min, unsigned, a < b ? a : b)
EVO_EMU_REDUCTION(min, int, a < b ? a : b)
EVO_EMU_REDUCTION(and, unsigned, a & b)
EVO_EMU_REDUCTION(or, unsigned, a | b)
EVO_EMU_REDUCTION(xor, unsigned, a ^ b)
#undef EVO_EMU_REDUCTION

inline size_t __cvta_generic_to_shared(const void* p) { return evo_emu::shared_offset(p); }
inline void* __cvta_shared_to_generic(size_t offset) { return evo_emu::shared_address(unsigned(offset)); }
inline unsigned __isShared(const void* p) { return evo_emu::shared_offset(p) != ~0u; }
