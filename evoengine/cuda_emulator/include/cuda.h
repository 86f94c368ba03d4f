// Of the driver's header what device code uses: the 128 bytes of a tensor map.
#pragma once
struct alignas(64) CUtensorMap_st {
    unsigned long long opaque[16];
};
typedef CUtensorMap_st CUtensorMap;
