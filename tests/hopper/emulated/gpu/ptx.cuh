// The device words that the arithmetic of a kernel uses, for one thread on the host: a test sets
// threadIdx and calls the kernel's own functions. What passes between threads does not.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "math/formats.h"

#define __host__
#define __device__
#define TEA_DEVICE inline

struct Coordinates {
  unsigned x;
};
inline thread_local Coordinates threadIdx{0}, blockIdx{0}, gridDim{1};
struct uint4 {
  uint32_t x, y, z, w;
};
struct float2 {
  float x, y;
};
inline float __uint_as_float(uint32_t bits) { return tea::bits_float(bits); }
inline uint32_t __float_as_uint(float x) { return tea::float_bits(x); }
inline int __popc(uint32_t bits) { return __builtin_popcount(bits); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline int atomicAdd(int* at, int more) { return (*at += more) - more; }
inline int atomicOr(int* at, int bits) { return *at |= bits; }
// As if all lanes were alike.
template <class T>
T __shfl_sync(uint32_t, T x, int) {
  return x;
}
template <class T>
T __shfl_up_sync(uint32_t, T x, int) {
  return x;
}
template <class T>
T __shfl_xor_sync(uint32_t, T x, int) {
  return x;
}
inline int __reduce_max_sync(uint32_t, int x) { return x; }
inline uint32_t __ballot_sync(uint32_t lanes, bool x) { return x ? lanes : 0; }

namespace tea {

using std::max;
using std::min;

inline float exp2_fast(float x) { return std::exp2(x); }
inline float log2_fast(float x) { return std::log2(x); }
inline float float_of_half(uint16_t bits) { return fp16_decode(bits); }
inline uint32_t shared_address(const void*) { return 0; }

}  // namespace tea
