// The limits that stdint.h defines, in numbers: the host's own names of them are not defined in a kernel. NVRTC is given this file
// too.
#pragma once
#undef INT8_MAX
#define INT8_MAX 127
#undef INT8_MIN
#define INT8_MIN (-128)
#undef INT16_MAX
#define INT16_MAX 32767
#undef INT16_MIN
#define INT16_MIN (-32768)
#undef INT32_MAX
#define INT32_MAX 2147483647
#undef INT32_MIN
#define INT32_MIN (-2147483647 - 1)
#undef INT64_MAX
#define INT64_MAX 9223372036854775807ll
#undef INT64_MIN
#define INT64_MIN (-9223372036854775807ll - 1)
#undef UINT8_MAX
#define UINT8_MAX 255
#undef UINT16_MAX
#define UINT16_MAX 65535
#undef UINT32_MAX
#define UINT32_MAX 4294967295u
#undef UINT64_MAX
#define UINT64_MAX 18446744073709551615ull
