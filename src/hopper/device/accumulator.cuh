// The register layout of a wgmma accumulator, 64 rows by N columns: a thread holds N / 2 elements
// of two rows that are eight apart, and the four threads of a quad share a row.
#pragma once
#include "gpu/warp.cuh"
#include "hopper/device/ptx.cuh"
#include "hopper/device/swizzle.cuh"

namespace tea::hopper {

TEA_DEVICE int warp_in_warpgroup() { return static_cast<int>(threadIdx.x) / 32 % 4; }

// The thread's row (0 or 1) that holds its element i, and the row and column of that element in the
// tile.
__host__ __device__ constexpr int row_slot(int i) { return i / 2 % 2; }
TEA_DEVICE int accumulator_row(int i) {
  return 16 * warp_in_warpgroup() + lane() / 4 + 8 * row_slot(i);
}
TEA_DEVICE int accumulator_column(int i) { return i / 4 * 8 + lane() % 4 * 2 + i % 2; }

// threadIdx.x, read where this is called: the compiler would keep what derives from it in registers
// through a whole mainloop, which may have none to spare.
TEA_DEVICE int reread_thread() {
  uint32_t thread;
  asm volatile("mov.u32 %0, %%tid.x;\n" : "=r"(thread));
  return static_cast<int>(thread);
}
// The row and column of the thread's element 0.
struct AccumulatorOrigin {
  int row, column;
};
TEA_DEVICE AccumulatorOrigin reread_accumulator_origin() {
  const auto thread = static_cast<uint32_t>(reread_thread());
  return {static_cast<int>(thread % 128 / 32 * 16 + thread % 32 / 4),
          static_cast<int>(thread % 4 * 2)};
}

// The maximum of the thread's elements of each of its rows.
template <int kCount>
TEA_DEVICE void thread_row_max(const float (&d)[kCount], float (&row_max)[2]) {
  row_max[0] = row_max[1] = kMinusInfinity;
#pragma unroll
  for (int i = 0; i < kCount; ++i) row_max[row_slot(i)] = fmaxf(row_max[row_slot(i)], d[i]);
}
template <int kCount>
TEA_DEVICE void thread_row_sum(const float (&d)[kCount], float (&sum)[2]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) sum[row_slot(i)] += d[i];
}
template <int kCount>
TEA_DEVICE void scale_rows(float (&d)[kCount], const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) d[i] *= factor[row_slot(i)];
}

// The index of the thread's element i among its elements of the same row, in order of the column.
__host__ __device__ constexpr int index_in_row(int i) { return i / 4 * 2 + i % 2; }
// One bit for each of the thread's elements of a row, set if its column is in [begin, end);
// `origin` is the column of its element 0.
template <int kColumns>
TEA_DEVICE uint32_t column_mask(int begin, int end, int origin = accumulator_column(0)) {
  const auto first = [origin](int column) {  // index of the first element at or after this column
    const int x = max(0, min(column - origin, kColumns));
    return x / 8 * 2 + min(x % 8, 2);
  };
  const auto below = [](int n) { return static_cast<uint32_t>((uint64_t{1} << n) - 1); };
  return below(first(end)) & ~below(first(begin));
}

// Sets the elements whose bit is clear to -infinity. The loop goes row by row because ptxas then
// extracts seven predicates with one instruction.
template <int kCount>
TEA_DEVICE void mask_columns(float (&d)[kCount], const uint32_t (&visible)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r)
#pragma unroll
    for (int n = 0; n < kCount / 2; ++n)
      if (!(visible[r] & 1u << n)) d[n / 2 * 4 + n % 2 + 2 * r] = kMinusInfinity;
}

// Converts columns 16c to 16c + 15 to 16 bits: the register layout of both a wgmma A operand over
// those columns and of stmatrix_x4().
template <Type kType, int kCount>
TEA_DEVICE void accumulator_as_operand(uint32_t (&a)[4], const float (&d)[kCount], int c) {
#pragma unroll
  for (int r = 0; r < 4; ++r) a[r] = pack<kType>(d[8 * c + 2 * r], d[8 * c + 2 * r + 1]);
}

// An 8-bit A operand has 32 columns, of which a thread holds groups of four consecutive ones, but
// the accumulator gives it pairs that are eight apart. The columns are therefore permuted: position
// p of the operand holds column fp8_column(p), and the rows of B must be permuted in the same way.
__host__ __device__ constexpr int fp8_column(int p) {
  return p / 16 * 16 + p / 2 % 2 * 8 + p % 16 / 4 * 2 + p % 2;
}
template <Type kType, int kCount>
TEA_DEVICE void accumulator_as_fp8_operand(uint32_t (&a)[4], const float (&d)[kCount], int c) {
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const int at = 16 * c + r / 2 * 8 + r % 2 * 2;
    a[r] = pack<kType>(d[at], d[at + 1], d[at + 4], d[at + 5]);
  }
}

// A tile in shared memory as TMA reads it: slabs one swizzle wide and `rows` high.
struct SharedTile {
  void* base;
  Swizzle swizzle;
  int rows;
};

// Stores the warpgroup's accumulator to rows first_row to first_row + 63 of a 16-bit tile.
template <Type kType, int kCount>
TEA_DEVICE void store_tile(const SharedTile& tile, int first_row, const float (&d)[kCount]) {
  const int matrix = lane() / 8;
  const int row = first_row + 16 * warp_in_warpgroup() + lane() % 8 + matrix % 2 * 8;
#pragma unroll
  for (int c = 0; c < kCount / 8; ++c) {
    uint32_t r[4];
    accumulator_as_operand<kType>(r, d, c);
    const int at = (16 * c + matrix / 2 * 8) * 2, slab = at / width(tile.swizzle);
    const uint32_t offset = slab * tile.rows * width(tile.swizzle) +
                            swizzled(tile.swizzle, row, at % width(tile.swizzle));
    stmatrix_x4(shared_address(tile.base) + offset, r);
  }
}

}  // namespace tea::hopper
