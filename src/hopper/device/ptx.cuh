// PTX wrappers for sm_90a, one instruction each: register reallocation, fences, named barriers,
// clusters, approximate functions, packing, stmatrix and movmatrix. TMA is in tma.cuh, wgmma in
// wgmma.cuh. The backward pass needs the cluster instructions, stmatrix.trans, movmatrix and
// tanh_fast(); FP8 kernels need the 8-bit packing.
#pragma once
#include "gpu/bulk.cuh"
#include "hopper/device/types.h"

namespace tea::hopper {

// True in exactly one thread of the warp, which must be converged.
TEA_DEVICE bool elect_one() {
  uint32_t chosen;
  asm volatile("{\n .reg .pred p;\n elect.sync _|p, 0xffffffff;\n selp.u32 %0, 1, 0, p;\n}\n"
               : "=r"(chosen));
  return chosen != 0;
}

// Move registers between warpgroups. Every thread of the warpgroup must call.
template <int kRegisters>
TEA_DEVICE void warpgroup_reg_alloc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}
template <int kRegisters>
TEA_DEVICE void warpgroup_reg_dealloc() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}

// A release store and an acquire load at device scope: a thread that loads the stored value also
// observes everything the storing thread wrote before.
TEA_DEVICE void store_release(uint64_t& to, uint64_t x) {
  perturb();
  asm volatile("st.release.gpu.global.u64 [%0], %1;\n" ::"l"(&to), "l"(x) : "memory");
}
TEA_DEVICE uint64_t load_acquire(const uint64_t& from) {
  uint64_t x;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];\n" : "=l"(x) : "l"(&from) : "memory");
  return x;
}

// Named barriers 1 to 15 (0 is __syncthreads()). `threads` is a multiple of 32.
TEA_DEVICE void named_barrier_sync(int id, int threads) {
  perturb();
  asm volatile("bar.sync %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}
TEA_DEVICE void named_barrier_arrive(int id, int threads) {
  perturb();
  asm volatile("bar.arrive %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}

TEA_DEVICE uint32_t cluster_cta_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;\n" : "=r"(rank));
  return rank;
}
TEA_DEVICE void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;\n" ::: "memory");
}
TEA_DEVICE void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;\n" ::: "memory");
}
// The same shared-memory address in another CTA of the cluster.
TEA_DEVICE uint32_t map_shared_address(uint32_t address, uint32_t rank) {
  uint32_t mapped;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;\n" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}

// Not volatile, so that the compiler may move and merge these pure functions.
TEA_DEVICE float reciprocal_fast(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}
TEA_DEVICE float tanh_fast(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

// The minimum, or NaN if either operand is NaN.
TEA_DEVICE float min_nan(float x, float y) {
  float z;
  asm("min.NaN.f32 %0, %1, %2;\n" : "=f"(z) : "f"(x), "f"(y));
  return z;
}

// Sets every bit of each 16-bit half to that half's sign bit.
TEA_DEVICE uint32_t spread_sign_bits(uint32_t halves) {
  uint32_t mask;
  asm("prmt.b32 %0, %1, 0, 0xbb99;\n" : "=r"(mask) : "r"(halves));
  return mask;
}

// Rounds two floats to nearest even and packs them into one register, the first in the low half.
template <Type kType>
TEA_DEVICE uint32_t pack(float low, float high) {
  static_assert(kType == Type::kBf16 || kType == Type::kFp16, "two values fill it only in 16 bits");
  return kType == Type::kBf16 ? pack_bf16(low, high) : pack_fp16(low, high);
}

// Packs four floats as FP8 into one register, the first in the low byte, saturated to the largest
// finite value.
template <Type kType>
TEA_DEVICE uint32_t pack(float a, float b, float c, float d) {
  uint16_t low, high;
  if constexpr (kType == Type::kE4M3) {
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;\n" : "=h"(low) : "f"(b), "f"(a));
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;\n" : "=h"(high) : "f"(d), "f"(c));
  } else {
    static_assert(kType == Type::kE5M2, "four values fill a register only in 8 bits");
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;\n" : "=h"(low) : "f"(b), "f"(a));
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;\n" : "=h"(high) : "f"(d), "f"(c));
  }
  return uint32_t{high} << 16 | low;
}

// The inverses of ldmatrix_x4() and ldmatrix_x4_trans().
TEA_DEVICE void stmatrix_x4(uint32_t address, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(address),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}
TEA_DEVICE void stmatrix_x4_trans(uint32_t address, const uint32_t (&r)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(address),
      "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
      : "memory");
}
// Transposes one 8x8 matrix of 16-bit values across the warp.
TEA_DEVICE uint32_t movmatrix_trans(uint32_t r) {
  uint32_t t;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;\n" : "=r"(t) : "r"(r));
  return t;
}

}  // namespace tea::hopper
