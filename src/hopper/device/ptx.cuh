// Words over PTX that belong to no unit: registers, fences, named barriers, clusters, fast
// functions, packing and the matrix moves of a warp. One instruction each; sm_90a. Those of
// clusters, the matrix moves and tanh_fast() are for the backward pass, fp8 for kernels of that
// type.
#pragma once
#include "gpu/bulk.cuh"

namespace tea::hopper {

// What a matrix instruction or a tensor map sees in memory.
enum class Type { kBf16, kFp16, kE4M3, kE5M2, kFp32 };

__host__ __device__ constexpr int bytes(Type t) {
  return t == Type::kFp32 ? 4 : t == Type::kBf16 || t == Type::kFp16 ? 2 : 1;
}

// True in one thread of the warp, which must be converged.
TEA_DEVICE bool elect_one() {
  uint32_t chosen;
  asm volatile("{\n .reg .pred p;\n elect.sync _|p, 0xffffffff;\n selp.u32 %0, 1, 0, p;\n}\n"
               : "=r"(chosen));
  return chosen != 0;
}

// The register file moves between warpgroups; every thread of the warpgroup must call.
template <int kRegisters>
TEA_DEVICE void grow_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}
template <int kRegisters>
TEA_DEVICE void shrink_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}

// Whoever reads what was written sees what the writer wrote before, anywhere on the device.
TEA_DEVICE void store_release(uint64_t& to, uint64_t x) {
  perturb();
  asm volatile("st.release.gpu.global.u64 [%0], %1;\n" ::"l"(&to), "l"(x) : "memory");
}
TEA_DEVICE uint64_t load_acquire(const uint64_t& from) {
  uint64_t x;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];\n" : "=l"(x) : "l"(&from) : "memory");
  return x;
}

// Named barriers 1..15 (0 is __syncthreads); threads is a multiple of 32.
TEA_DEVICE void named_sync(int id, int threads) {
  perturb();
  asm volatile("bar.sync %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}
TEA_DEVICE void named_arrive(int id, int threads) {
  perturb();
  asm volatile("bar.arrive %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}

TEA_DEVICE uint32_t cluster_rank() {
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
// The same shared address in another block of the cluster.
TEA_DEVICE uint32_t cluster_address(uint32_t address, uint32_t rank) {
  uint32_t mapped;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;\n" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}

// Not volatile: the compiler may move and merge pure functions.
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

// The smaller, or NaN if either is.
TEA_DEVICE float min_or_nan(float x, float y) {
  float z;
  asm("min.NaN.f32 %0, %1, %2;\n" : "=f"(z) : "f"(x), "f"(y));
  return z;
}

// All bits of a half of the register whose highest is one, none of the other's.
TEA_DEVICE uint32_t spread_signs(uint32_t halves) {
  uint32_t mask;
  asm("prmt.b32 %0, %1, 0, 0xbb99;\n" : "=r"(mask) : "r"(halves));
  return mask;
}

// Two floats as one register, the first in the low half, rounded to nearest even.
template <Type kType>
TEA_DEVICE uint32_t pack(float low, float high) {
  static_assert(kType == Type::kBf16 || kType == Type::kFp16, "two values fill it only in 16 bits");
  return kType == Type::kBf16 ? pack_bf16(low, high) : pack_fp16(low, high);
}

// Four floats as one register of fp8, the first in the low byte, saturated to the largest finite.
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

// The reverse of load_matrices(), and of its transpose.
TEA_DEVICE void store_matrices(uint32_t address, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(address),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}
TEA_DEVICE void store_matrices_transposed(uint32_t address, const uint32_t (&r)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(address),
      "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
      : "memory");
}
// One 8x8 matrix of 16-bit values, transposed across the warp.
TEA_DEVICE uint32_t transpose_matrix(uint32_t r) {
  uint32_t t;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;\n" : "=r"(t) : "r"(r));
  return t;
}

}  // namespace tea::hopper
