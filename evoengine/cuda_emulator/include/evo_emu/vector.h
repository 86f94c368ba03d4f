// The built-in vector types with CUDA's sizes and alignments; uint3 is the runtime's.
#pragma once

#define EVO_EMU_THREE(T, name) struct name##3 { T x, y, z; };
EVO_EMU_THREE(signed char, char) EVO_EMU_THREE(unsigned char, uchar) EVO_EMU_THREE(short, short)
EVO_EMU_THREE(unsigned short, ushort) EVO_EMU_THREE(int, int) EVO_EMU_THREE(long long, longlong)
EVO_EMU_THREE(unsigned long long, ulonglong) EVO_EMU_THREE(float, float) EVO_EMU_THREE(double, double)
#undef EVO_EMU_THREE

#define EVO_EMU_VECTOR(T, name, align2, align4)                                                        \
    struct name##1 { T x; };                                                                           \
    struct alignas(align2) name##2 { T x, y; };                                                        \
    struct alignas(align4) name##4 { T x, y, z, w; };                                                  \
    inline name##1 make_##name##1(T x) { return {x}; }                                                 \
    inline name##2 make_##name##2(T x, T y) { return {x, y}; }                                         \
    inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }                                 \
    inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }

EVO_EMU_VECTOR(signed char, char, 2, 4)
EVO_EMU_VECTOR(unsigned char, uchar, 2, 4)
EVO_EMU_VECTOR(short, short, 4, 8)
EVO_EMU_VECTOR(unsigned short, ushort, 4, 8)
EVO_EMU_VECTOR(int, int, 8, 16)
EVO_EMU_VECTOR(unsigned int, uint, 8, 16)
EVO_EMU_VECTOR(long long, longlong, 16, 16)
EVO_EMU_VECTOR(unsigned long long, ulonglong, 16, 16)
EVO_EMU_VECTOR(float, float, 8, 16)
EVO_EMU_VECTOR(double, double, 16, 16)
#undef EVO_EMU_VECTOR
