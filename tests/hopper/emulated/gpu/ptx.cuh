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
struct uint2 {
  unsigned x, y;
};
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
inline void __syncwarp() {}
inline void __syncthreads() {}
inline uint32_t __ballot_sync(uint32_t lanes, bool x) { return x ? lanes : 0; }
inline bool __all_sync(uint32_t, bool x) { return x; }

namespace tea {

using std::max;
using std::min;

inline float exp2_fast(float x) { return std::exp2(x); }
inline float log2_fast(float x) { return std::log2(x); }
inline float half_to_float(uint16_t bits) { return fp16_decode(bits); }

// Shared memory, and the matrices that a warp loads from it. A row's address comes from another
// lane: so all lanes run once for their addresses, each from matrix_load = 0 on, and then again.
alignas(1024) inline thread_local uint8_t shared_memory[64 << 10];
inline thread_local uint32_t matrix_rows[64][32];
inline thread_local int matrix_load;
inline uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(static_cast<const uint8_t*>(p) - shared_memory);
}
inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
  const unsigned lane = threadIdx.x % 32;
  uint32_t(&rows)[32] = matrix_rows[matrix_load++];
  rows[lane] = address;
  for (unsigned i = 0; i < 4; ++i)
    memcpy(&r[i], shared_memory + rows[8 * i + lane / 4] + lane % 4 * 4, 4);
}

}  // namespace tea
