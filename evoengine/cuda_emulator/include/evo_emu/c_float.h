// What float.h defines, in numbers: the host's own names of them are not defined in a kernel. NVRTC is given this file
// too.
#pragma once
#undef FLT_MAX
#define FLT_MAX 3.402823466e+38f
#undef FLT_MIN
#define FLT_MIN 1.175494351e-38f
#undef FLT_EPSILON
#define FLT_EPSILON 1.192092896e-07f
#undef DBL_MAX
#define DBL_MAX 1.7976931348623158e+308
#undef DBL_MIN
#define DBL_MIN 2.2250738585072014e-308
#undef DBL_EPSILON
#define DBL_EPSILON 2.2204460492503131e-16
