// Copies by a whole group, in pieces of 16, 8 or 4 bytes as the addresses allow; each thread moves its share.
#pragma once
#include <cooperative_groups.h>

namespace cooperative_groups {

template <class Group>
inline void memcpy_async(const Group& group, void* to, const void* from, size_t bytes, EVO_EMU_LINE) {
    const unsigned long places = (unsigned long)to | (unsigned long)from | bytes;
    const unsigned piece = places % 16 == 0 ? 16 : places % 8 == 0 ? 8 : 4;
    if (places % 4) evo_emu::crash("memcpy_async at line %d: addresses and bytes must be multiples of 4", line);
    if (!__isShared(to)) evo_emu::crash("memcpy_async at line %d: its target is not in shared memory", line);
    for (size_t at = group.thread_rank() * size_t(piece); at < bytes; at += group.size() * size_t(piece))
        evo_emu::copy_async(evo_emu::shared_offset((char*)to + at), (const char*)from + at, piece, ~0u, line);
    evo_emu::copy_async_commit();
}
template <unsigned groups_left, class Group> inline void wait_prior(const Group& group, EVO_EMU_LINE) {
    evo_emu::copy_async_wait(groups_left, line);
    group.sync(line);
}
template <class Group> inline void wait(const Group& group, EVO_EMU_LINE) { wait_prior<0>(group, line); }

}  // namespace cooperative_groups
