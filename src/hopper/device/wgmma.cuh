// The matrix instruction of a warpgroup: D[64, N] += A[64, K] B[K, N], D in registers (see
// tile.cuh for which), A in shared memory or registers, B in shared memory. K is 32 bytes of a row.
#pragma once
#include "hopper/device/ptx.cuh"
#include "hopper/device/swizzle.cuh"
#include "hopper/device/wgmma_lists.cuh"

namespace tea::hopper {

// Which index of an operand is contiguous in shared memory: the summed one, or that of D.
enum class Major : int { kSummed = 0, kOuter = 1 };

// An operand in shared memory. Summed-major: rows of D's index, a swizzle's width of K each, eight
// rows to a group. Outer-major: rows of K, a swizzle's width of D's index each; a wider operand
// continues `slab_bytes` further on.
TEA_DEVICE uint64_t descriptor(const void* p, Swizzle s, uint32_t slab_bytes = 16) {
  const uint64_t kinds[] = {0, 3, 2, 0, 1};  // by width / 32: none, 32, 64, -, 128
  const uint64_t address = (shared_address(p) & 0x3FFFF) >> 4, group = 8 * width(s) / 16;
  return address | uint64_t{slab_bytes >> 4} << 16 | group << 32 | kinds[width(s) / 32] << 62;
}
// The same operand further on in shared memory. Addresses have no carry into what is above them, so
// either sum will do: of 64 bits, one instruction, for which the assembler takes eight where it
// finds no pair of registers; or of the lower 32, always two. Between two products eight take as
// long as a product.
enum class Sum { kWide, kLow };
template <Sum kSum = Sum::kWide>
TEA_DEVICE uint64_t advanced(uint64_t d, uint32_t by_bytes) {
  if constexpr (kSum == Sum::kWide) return d + (by_bytes >> 4);
  uint64_t further;
  asm("{\n .reg .b32 low, high;\n mov.b64 {low, high}, %1;\n"
      " add.u32 low, low, %2;\n mov.b64 %0, {low, high};\n}\n"
      : "=l"(further)
      : "l"(d), "r"(by_bytes >> 4));
  return further;
}

// Before the first instruction of a batch, and whenever registers it uses were written.
TEA_DEVICE void matrix_fence() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }
TEA_DEVICE void matrix_commit() { asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory"); }
// At most kPending batches still run; the registers of the others may be read.
template <int kPending>
TEA_DEVICE void matrix_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(kPending) : "memory");
}
// Keeps the compiler from moving reads and writes of an accumulator across this point: it does not
// know that the instruction runs on after its issue.
template <int kCount>
TEA_DEVICE void pin(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
template <int kCount>
TEA_DEVICE void pin(uint32_t (&a)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(a[i])::"memory");
}

// Keeps what follows, a wait, behind the computation of x. The assembler moves a wait as it likes,
// and sees nothing in an empty statement; but it moves none across a store. This one is never made:
// no weight of a softmax is so large.
TEA_DEVICE void follow(float x, uint32_t& spare) {
  asm volatile(
      "{\n .reg .pred p;\n setp.gt.f32 p, %0, 0f7F000000;\n @p st.shared.u32 [%1], 0;\n}\n" ::"f"(
          x),
      "r"(shared_address(&spare))
      : "memory");
}

// What a multiplication takes beside its operands. Outer-major operands exist in 16 bits only.
struct Shape {
  int n;
  Type a, b;
  Major major_a = Major::kSummed, major_b = Major::kSummed;
  constexpr bool valid() const {
    const bool wide = bytes(a) == 2 && a == b, narrow = bytes(a) == 1 && bytes(b) == 1;
    const bool summed = major_a == Major::kSummed && major_b == Major::kSummed;
    return n % 16 == 0 && n >= 16 && n <= 256 && (wide || (narrow && summed));
  }
};

// Adds to D if `sum`, else overwrites it.
template <Shape S>
TEA_DEVICE void multiply(float (&d)[S.n / 2], uint64_t a, uint64_t b, bool sum) {
  static_assert(S.valid(), "no such matrix instruction");
  constexpr int kA = static_cast<int>(S.major_a), kB = static_cast<int>(S.major_b);
  const int add = sum;
  TEA_WGMMA_FROM_SHARED(S, d, a, b, add, kA, kB)
}
template <Shape S>
TEA_DEVICE void multiply(float (&d)[S.n / 2], const uint32_t (&a)[4], uint64_t b, bool sum) {
  static_assert(S.valid(), "no such matrix instruction");
  static_assert(S.major_a == Major::kSummed, "a register operand has no other order");
  constexpr int kB = static_cast<int>(S.major_b);
  const int add = sum;
  TEA_WGMMA_FROM_REGISTERS(S, d, a, b, add, kB)
}

}  // namespace tea::hopper
