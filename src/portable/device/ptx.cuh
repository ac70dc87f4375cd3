// Words over PTX that this engine has beside those of src/gpu: asynchronous copies, accesses to
// shared memory and matrix multiply-adds of a warp. One instruction each; from sm_80 on.
#pragma once
#include "gpu/warp.cuh"
#include "te_attention.h"

namespace tea::portable {

// The same value, of which the compiler knows nothing: what follows from it is computed where it is
// used, not before a loop and kept in registers.
TEA_DEVICE int64_t afresh(int64_t x) {
  asm volatile("" : "+l"(x));
  return x;
}
// For the number of a thread or lane: it is not negative, so that its division by a power of two is
// one shift.
TEA_DEVICE int afresh_thread(int x) {
  asm volatile("" : "+r"(x));
  __builtin_assume(x >= 0 && x < 1024);
  return x;
}

// 16 bytes to shared memory, or 16 zeros: `from` is not read then.
TEA_DEVICE void copy_16(uint32_t to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(to), "l"(from),
               "r"(valid ? 16 : 0)
               : "memory");
}
// The same with 4 bytes.
TEA_DEVICE void copy_4(uint32_t to, const void* from, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;\n" ::"r"(to), "l"(from),
               "r"(valid ? 4 : 0)
               : "memory");
}
TEA_DEVICE void commit_copies() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
// Until at most this many of the thread's newest groups are under way.
template <int kGroups>
TEA_DEVICE void wait_copies() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kGroups) : "memory");
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

// c += a b, 16x8x16, fp32 sums. (Volatile, so that loads of operands stay near their use. c goes in
// and out apart: where it is zero no register is cleared.) The lane holds of c rows l/4 and l/4 +
// 8, columns 2(l%4) and next.
template <int kDtype>
TEA_DEVICE void multiply_16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  static_assert(kDtype == TEA_FP16 || kDtype == TEA_BF16);
  if constexpr (kDtype == TEA_BF16) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%10, %11, %12, %13};\n"
        : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]),
          "f"(c[2]), "f"(c[3]));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%10, %11, %12, %13};\n"
        : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]),
          "f"(c[2]), "f"(c[3]));
  }
}
// c += a b, 16x8x8, operands of 11 significant bits in the top of an fp32.
TEA_DEVICE void multiply_tf32(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%10, %11, %12, %13};\n"
      : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]),
        "f"(c[2]), "f"(c[3]));
}
// To 11 significant bits, to nearest.
TEA_DEVICE uint32_t round_tf32(float x) {
  uint32_t bits;
  asm("cvt.rna.tf32.f32 %0, %1;\n" : "=r"(bits) : "f"(x));
  return bits;
}

// The smaller one, or NaN where one is.
TEA_DEVICE float smaller(float a, float b) {
  float x;
  asm("min.NaN.f32 %0, %1, %2;\n" : "=f"(x) : "f"(a), "f"(b));
  return x;
}
// Adds to four floats in global memory, of which the first lies on a multiple of 16 bytes.
TEA_DEVICE void add_4(float* to, float a, float b, float c, float d) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};\n" ::"l"(to), "f"(a), "f"(b), "f"(c),
               "f"(d)
               : "memory");
#else
  atomicAdd(to, a), atomicAdd(to + 1, b), atomicAdd(to + 2, c), atomicAdd(to + 3, d);
#endif
}

// Two floats as one register, the first in the low half, rounded to nearest even.
template <int kDtype>
TEA_DEVICE uint32_t pack(float low, float high) {
  static_assert(kDtype == TEA_FP16 || kDtype == TEA_BF16);
  return kDtype == TEA_BF16 ? pack_bf16(low, high) : pack_fp16(low, high);
}

}  // namespace tea::portable
