// Loads and stores with a cache hint, which changes nothing here.
#pragma once
#include <evo_emu/runtime.h>

#define EVO_EMU_LOAD(name) \
    template <class T> inline T name(const T* p) { return *p; }
#define EVO_EMU_STORE(name) \
    template <class T> inline void name(T* p, evo_emu::Exactly<T> v) { *p = v; }
EVO_EMU_LOAD(__ldcg) EVO_EMU_LOAD(__ldca) EVO_EMU_LOAD(__ldcs) EVO_EMU_LOAD(__ldlu) EVO_EMU_LOAD(__ldcv)
EVO_EMU_STORE(__stcg) EVO_EMU_STORE(__stcs) EVO_EMU_STORE(__stwb) EVO_EMU_STORE(__stwt)
#undef EVO_EMU_LOAD
#undef EVO_EMU_STORE
template <class T> inline T __ldg(const T* p, int line = __builtin_LINE()) {
#if EVO_EMU_CHECKED
    evo_emu::read_only_load(p, sizeof(T), line);
#endif
    (void)line;
    return *p;
}
