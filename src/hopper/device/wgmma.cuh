// wgmma: D[64, N] += A[64, K] B[K, N] by a warpgroup. D is in registers (accumulator.cuh has the
// layout), A in shared memory or registers, B in shared memory. K is 32 bytes of a row.
#pragma once
#include "hopper/device/ptx.cuh"
#include "hopper/device/swizzle.cuh"
#include "hopper/device/wgmma_lists.cuh"

namespace tea::hopper {

// The index of an operand that is contiguous in shared memory: K, or the index of D (M or N).
enum class Major : int { kK = 0, kMN = 1 };

// The matrix descriptor of an operand in shared memory. K-major: rows indexed by M or N that are
// one swizzle width of K wide, eight rows to a core-matrix group. MN-major: rows indexed by K that
// are one swizzle width of M or N wide; a wider operand continues `slab_bytes` further on.
TEA_DEVICE uint64_t make_descriptor(const void* p, Swizzle s, uint32_t slab_bytes = 16) {
  const uint64_t kinds[] = {0, 3, 2, 0, 1};  // by width / 32: none, 32, 64, -, 128
  const uint64_t address = (shared_address(p) & 0x3FFFF) >> 4, group = 8 * width(s) / 16;
  return address | uint64_t{slab_bytes >> 4} << 16 | group << 32 | kinds[width(s) / 32] << 62;
}
// The descriptor of a K-major operand without a swizzle whose core matrices, 8 rows of 16 bytes,
// are all the same one.
TEA_DEVICE uint64_t make_repeating_descriptor(const void* p) {
  return (shared_address(p) & 0x3FFFF) >> 4;
}
// The descriptor of the same operand `by_bytes` further on in shared memory. The address field
// never carries into the fields above it, so the addition may be done in 64 bits or in the
// lower 32. The 64-bit form is one instruction, but ptxas emits eight where no aligned register
// pair is free; the 32-bit form is always two. Eight instructions between two wgmmas take as long
// as a wgmma.
enum class DescriptorAdd { k64Bit, k32Bit };
template <DescriptorAdd kAdd = DescriptorAdd::k64Bit>
TEA_DEVICE uint64_t advance_descriptor(uint64_t d, uint32_t by_bytes) {
  if constexpr (kAdd == DescriptorAdd::k64Bit) return d + (by_bytes >> 4);
  uint64_t further;
  asm("{\n .reg .b32 low, high;\n mov.b64 {low, high}, %1;\n"
      " add.u32 low, low, %2;\n mov.b64 %0, {low, high};\n}\n"
      : "=l"(further)
      : "l"(d), "r"(by_bytes >> 4));
  return further;
}

// Required before the first wgmma of a group, and after any write to registers that it uses.
TEA_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }
TEA_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory"); }
// Waits until at most kPending groups are in flight; the registers of completed groups may be read.
template <int kPending>
TEA_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(kPending) : "memory");
}
// Keeps the compiler from moving reads and writes of an accumulator across this point: it does not
// know that a wgmma is asynchronous.
template <int kCount>
TEA_DEVICE void wgmma_fence_operand(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
template <int kCount>
TEA_DEVICE void wgmma_fence_operand(uint32_t (&a)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(a[i])::"memory");
}

// Keeps the wait that follows behind the computation of x. ptxas reorders wgmma waits freely and
// ignores an empty asm statement, but it moves no wait across a store. The predicate of this store
// is never true, because no value of P is that large.
TEA_DEVICE void wait_after(float x, uint32_t& never_written) {
  asm volatile(
      "{\n .reg .pred p;\n setp.gt.f32 p, %0, 0f7F000000;\n @p st.shared.u32 [%1], 0;\n}\n" ::"f"(
          x),
      "r"(shared_address(&never_written))
      : "memory");
}

// The static parameters of a wgmma. MN-major operands exist for 16-bit types only.
struct WgmmaShape {
  int n;
  Type a, b;
  Major major_a = Major::kK, major_b = Major::kK;
  constexpr bool valid() const {
    const bool wide = bytes(a) == 2 && a == b, narrow = bytes(a) == 1 && bytes(b) == 1;
    const bool summed = major_a == Major::kK && major_b == Major::kK;
    return n % 16 == 0 && n >= 16 && n <= 256 && (wide || (narrow && summed));
  }
};

// Accumulates into D if `accumulate`, else overwrites it.
template <WgmmaShape S>
TEA_DEVICE void wgmma(float (&d)[S.n / 2], uint64_t a, uint64_t b, bool accumulate) {
  static_assert(S.valid(), "no such matrix instruction");
  constexpr int kA = static_cast<int>(S.major_a), kB = static_cast<int>(S.major_b);
  const int add = accumulate;
  TEA_WGMMA_FROM_SHARED(S, d, a, b, add, kA, kB)
}
template <WgmmaShape S>
TEA_DEVICE void wgmma(float (&d)[S.n / 2], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
  static_assert(S.valid(), "no such matrix instruction");
  static_assert(S.major_a == Major::kK, "a register operand has no other order");
  constexpr int kB = static_cast<int>(S.major_b);
  const int add = accumulate;
  TEA_WGMMA_FROM_REGISTERS(S, d, a, b, add, kB)
}

}  // namespace tea::hopper
