// Copies from global to shared memory that a thread waits for, as NVIDIA's header of this name has them.
#pragma once
#include <evo_emu/cuda.h>

inline void __pipeline_memcpy_async(void* shared, const void* global, size_t bytes, size_t zero_filled = 0,
                                    EVO_EMU_LINE) {
    if ((bytes != 4 && bytes != 8 && bytes != 16) || zero_filled > bytes)
        evo_emu::crash("__pipeline_memcpy_async of %lu bytes at line %d: 4, 8 or 16", bytes, line);
    evo_emu::copy_async(evo_emu::shared_offset(shared), global, unsigned(bytes), unsigned(bytes - zero_filled), line);
}
inline void __pipeline_commit() { evo_emu::copy_async_commit(); }
inline void __pipeline_wait_prior(size_t groups_left, EVO_EMU_LINE) {
    evo_emu::copy_async_wait(unsigned(groups_left), line);
}
