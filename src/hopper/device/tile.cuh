// The accumulator of a warpgroup, 64 rows by N columns: a thread holds N / 2 elements of two rows,
// eight apart, and the four threads of a quad hold a row between them.
#pragma once
#include "gpu/warp.cuh"
#include "hopper/device/ptx.cuh"
#include "hopper/device/swizzle.cuh"

namespace tea::hopper {

TEA_DEVICE int warp_of_group() { return static_cast<int>(threadIdx.x) / 32 % 4; }

// Which of the thread's two rows element i is in, and where that row and its column lie in the
// tile.
__host__ __device__ constexpr int half_of(int i) { return i / 2 % 2; }
TEA_DEVICE int row_of(int i) { return 16 * warp_of_group() + lane() / 4 + 8 * half_of(i); }
TEA_DEVICE int column_of(int i) { return i / 4 * 8 + lane() % 4 * 2 + i % 2; }

// The largest of the thread's elements of each of its rows.
template <int kCount>
TEA_DEVICE void thread_row_max(const float (&d)[kCount], float (&top)[2]) {
  top[0] = top[1] = kMinusInfinity;
#pragma unroll
  for (int i = 0; i < kCount; ++i) top[half_of(i)] = fmaxf(top[half_of(i)], d[i]);
}
template <int kCount>
TEA_DEVICE void thread_row_sum(const float (&d)[kCount], float (&sum)[2]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) sum[half_of(i)] += d[i];
}
template <int kCount>
TEA_DEVICE void scale_rows(float (&d)[kCount], const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) d[i] *= factor[half_of(i)];
}

// The thread's elements of one row are numbered by rising column; element i of the tile is this
// one.
__host__ __device__ constexpr int number_in_row(int i) { return i / 4 * 2 + i % 2; }
// One bit for each of the thread's elements of a row: is its column in [begin, end)?
template <int kColumns>
TEA_DEVICE uint32_t columns_between(int begin, int end) {
  const auto first = [](int column) {  // number of the first element at or behind this column
    const int x = max(0, min(column - column_of(0), kColumns));
    return x / 8 * 2 + min(x % 8, 2);
  };
  const auto below = [](int n) { return static_cast<uint32_t>((uint64_t{1} << n) - 1); };
  return below(first(end)) & ~below(first(begin));
}

// What those bits do not say becomes -infinity; row by row, since the assembler then makes seven
// predicates at once.
template <int kCount>
TEA_DEVICE void hide_unseen(float (&d)[kCount], const uint32_t (&seen)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r)
#pragma unroll
    for (int n = 0; n < kCount / 2; ++n)
      if (!(seen[r] & 1u << n)) d[n / 2 * 4 + n % 2 + 2 * r] = kMinusInfinity;
}

// Columns 16c.. of the tile in 16 bits: both the A operand of a multiplication over those columns
// and what store_matrices() writes.
template <Type kType, int kCount>
TEA_DEVICE void columns_as_operand(uint32_t (&a)[4], const float (&d)[kCount], int c) {
#pragma unroll
  for (int r = 0; r < 4; ++r) a[r] = pack<kType>(d[8 * c + 2 * r], d[8 * c + 2 * r + 1]);
}

// In 8 bits an operand has 32 columns, of which a thread must hold runs of four, but it holds pairs
// eight apart. So columns 32c.. go in a changed order: position p of the operand holds the column
// fp8_column(p), and the rows of the other operand must be permuted likewise.
__host__ __device__ constexpr int fp8_column(int p) {
  return p / 16 * 16 + p / 2 % 2 * 8 + p % 16 / 4 * 2 + p % 2;
}
template <Type kType, int kCount>
TEA_DEVICE void columns_as_fp8_operand(uint32_t (&a)[4], const float (&d)[kCount], int c) {
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const int at = 16 * c + r / 2 * 8 + r % 2 * 2;
    a[r] = pack<kType>(d[at], d[at + 1], d[at + 4], d[at + 5]);
  }
}

// A tile in shared memory as the copy engine reads it: slabs one swizzle wide, `rows` high.
struct SharedTile {
  void* base;
  Swizzle swizzle;
  int rows;
};

// Rows first_row.. of a 16-bit tile from the warpgroup's accumulator.
template <Type kType, int kCount>
TEA_DEVICE void store_tile(const SharedTile& tile, int first_row, const float (&d)[kCount]) {
  const int matrix = lane() / 8;
  const int row = first_row + 16 * warp_of_group() + lane() % 8 + matrix % 2 * 8;
#pragma unroll
  for (int c = 0; c < kCount / 8; ++c) {
    uint32_t r[4];
    columns_as_operand<kType>(r, d, c);
    const int at = (16 * c + matrix / 2 * 8) * 2, slab = at / width(tile.swizzle);
    const uint32_t offset = slab * tile.rows * width(tile.swizzle) +
                            swizzled(tile.swizzle, row, at % width(tile.swizzle));
    store_matrices(shared_address(tile.base) + offset, r);
  }
}

}  // namespace tea::hopper
