// PTX wrappers in addition to those of src/gpu: accesses to shared memory, and mma.sync in TF32.
// One instruction each; from sm_80 on.
#pragma once
#include "gpu/async_copy.cuh"
#include "gpu/mma.cuh"
#include "gpu/warp.cuh"
#include "te_attention.h"

namespace tea::portable {

// The same value, made opaque to the compiler: expressions of it are then computed where they are
// used, instead of before a loop, where they would occupy registers.
TEA_DEVICE int64_t opaque(int64_t x) {
  asm volatile("" : "+l"(x));
  return x;
}
// The same for the index of a thread or lane. It is not negative, so that its division by a power
// of two is one shift.
TEA_DEVICE int opaque_thread(int x) {
  asm volatile("" : "+r"(x));
  __builtin_assume(x >= 0 && x < 1024);
  return x;
}

TEA_DEVICE void store_shared_16(uint32_t to, uint4 x) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};\n" ::"r"(to), "r"(x.x), "r"(x.y), "r"(x.z),
               "r"(x.w)
               : "memory");
}
TEA_DEVICE uint4 load_shared_16(uint32_t from) {
  uint4 x;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(from)
               : "memory");
  return x;
}
TEA_DEVICE void store_shared_2(uint32_t to, uint16_t x) {
  asm volatile("st.shared.b16 [%0], %1;\n" ::"r"(to), "h"(x) : "memory");
}
TEA_DEVICE void store_shared_4(uint32_t to, uint32_t x) {
  asm volatile("st.shared.b32 [%0], %1;\n" ::"r"(to), "r"(x) : "memory");
}
TEA_DEVICE void store_shared_float2(uint32_t to, float2 x) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};\n" ::"r"(to), "f"(x.x), "f"(x.y) : "memory");
}
TEA_DEVICE float load_shared_float(uint32_t from) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];\n" : "=f"(x) : "r"(from) : "memory");
  return x;
}
TEA_DEVICE float2 load_shared_float2(uint32_t from) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];\n" : "=f"(x.x), "=f"(x.y) : "r"(from) : "memory");
  return x;
}

// mma_m16n8k16() for TF32: operands have 11 significant bits, in the upper bits of an fp32.
TEA_DEVICE void mma_m16n8k8_tf32(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%10, %11, %12, %13};\n"
      : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]),
        "f"(c[2]), "f"(c[3]));
}
// Rounds to nearest, to 11 significant bits.
TEA_DEVICE uint32_t round_tf32(float x) {
  uint32_t bits;
  asm("cvt.rna.tf32.f32 %0, %1;\n" : "=r"(bits) : "f"(x));
  return bits;
}

// The minimum, or NaN if either is NaN.
TEA_DEVICE float min_or_nan(float a, float b) {
  float x;
  asm("min.NaN.f32 %0, %1, %2;\n" : "=f"(x) : "f"(a), "f"(b));
  return x;
}
// Adds atomically to four floats in global memory, at a multiple of 16 bytes.
TEA_DEVICE void red_add_4(float* to, float a, float b, float c, float d) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};\n" ::"l"(to), "f"(a), "f"(b), "f"(c),
               "f"(d)
               : "memory");
#else
  atomicAdd(to, a), atomicAdd(to + 1, b), atomicAdd(to + 2, c), atomicAdd(to + 3, d);
#endif
}

// Rounds two floats to nearest even and packs them into one register, the first in the low half.
template <int kDtype>
TEA_DEVICE uint32_t pack(float low, float high) {
  static_assert(kDtype == TEA_FP16 || kDtype == TEA_BF16);
  return kDtype == TEA_BF16 ? pack_bf16(low, high) : pack_fp16(low, high);
}

}  // namespace tea::portable
