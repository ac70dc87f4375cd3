// The device words of src/hopper that the arithmetic of a kernel uses, for one thread on the host.
#pragma once
#include "gpu/ptx.cuh"

namespace tea::hopper {

enum class Type { kBf16, kFp16, kE4M3, kE5M2, kFp32 };

inline float reciprocal_fast(float x) { return 1 / x; }
inline float min_or_nan(float x, float y) { return x != x || x < y ? x : y; }
inline uint32_t spread_signs(uint32_t halves) {
  return (halves >> 31 ? 0xFFFF0000u : 0) | (halves >> 15 & 1 ? 0xFFFFu : 0);
}
inline void store_release(uint64_t& to, uint64_t x) { to = x; }
inline uint64_t load_acquire(const uint64_t& from) { return from; }
inline void store_matrices(uint32_t, const uint32_t (&)[4]) {}
template <Type kType>
uint32_t pack(float, float) {
  return 0;
}
template <Type kType>
uint32_t pack(float, float, float, float) {
  return 0;
}

}  // namespace tea::hopper
