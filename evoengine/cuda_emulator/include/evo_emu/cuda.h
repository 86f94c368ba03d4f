// What NVRTC gives a kernel without any include: keywords, built-in variables, vector types, arithmetic, collectives.
#pragma once
#include <evo_emu/runtime.h>

#define __global__
#define __device__
#define __host__
#define __constant__
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __maxnreg__(...)
#define __block_size__(...)
#define __managed__
#define __nv_pure__
#define __inline_hint__
#define __device_builtin__
#define __cudart_builtin__
#define __builtin_align__(n) __attribute__((aligned(n)))
#define __CUDA_ARCH_HAS_FEATURE__(feature) __CUDA_ARCH_FEAT_##feature
#define __builtin_assume(condition) ((void)0)
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __align__(n) __attribute__((aligned(n)))
#define assert(condition) \
    ((condition) ? (void)0 : evo_emu::crash("assertion failed at line %d: %s", __LINE__, #condition))

using size_t = decltype(sizeof(0));
using ptrdiff_t = __PTRDIFF_TYPE__;
struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
    constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
    constexpr operator uint3() const { return {x, y, z}; }
};
inline constexpr int warpSize = 32;

extern "C" void* memcpy(void*, const void*, size_t) noexcept;
extern "C" void* memset(void*, int, size_t) noexcept;

// What a kernel prints is dropped: a candidate is judged by its tensors.
template <class... T>
inline int printf(const char*, const T&...) {
    return 0;
}

[[noreturn]] inline void __trap(int line = __builtin_LINE()) { evo_emu::crash("__trap at line %d", line); }

namespace std {}
namespace cuda {
namespace std = ::std;  // its headers are mapped to the host's by includes.py
}

#include <evo_emu/poison.h>
#include <evo_emu/vector.h>
#include <evo_emu/math.h>
#include <evo_emu/integer.h>
#include <evo_emu/memory.h>
#if EVO_EMU_CHECKED  // no other kernel has atomics, and each parses this
#include <evo_emu/atomics.h>
#endif
#include <evo_emu/collectives.h>
#include <evo_emu/ptx.h>
