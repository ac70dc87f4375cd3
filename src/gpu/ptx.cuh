// PTX wrappers that all engines share, one instruction each, for sm_80 and later: shared-memory
// addresses, approximate functions, packing, ldmatrix.
#pragma once
#include <cstdint>

namespace tea {

#define TEA_DEVICE __device__ __forceinline__

// The 32-bit shared-memory address of a pointer.
TEA_DEVICE uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Not volatile, so that the compiler may move and merge these pure functions.
TEA_DEVICE float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}
TEA_DEVICE float log2_fast(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}
TEA_DEVICE float half_to_float(uint16_t bits) {
  float x;
  asm("cvt.f32.f16 %0, %1;\n" : "=f"(x) : "h"(bits));
  return x;
}

// Rounds two floats to nearest even and packs them into one register, the first in the low half.
TEA_DEVICE uint32_t pack_bf16(float low, float high) {
  uint32_t both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(both) : "f"(high), "f"(low));
  return both;
}
TEA_DEVICE uint32_t pack_fp16(float low, float high) {
  uint32_t both;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;\n" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

// Loads four 8x8 matrices of 16-bit values. Lane 8i + r passes the address of row r of matrix i;
// register i of lane l receives elements (l/4, 2(l%4)) and (l/4, 2(l%4) + 1) of matrix i, or of its
// transpose.
TEA_DEVICE void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
TEA_DEVICE void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

}  // namespace tea
