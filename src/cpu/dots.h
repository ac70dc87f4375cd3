// Products of the tiles of packed_tiles.h by AVX-512's dot products of two bf16 numbers, for
// processors without AMX. Included by flash_avx512_bf16.cpp after it, inside its
// namespace.
#pragma once

// M rows x N vectors of C = or += A B over `steps` tiles of k; `a` begins with the first of the
// rows. Each step of two k's multiplies M pairs of A, one by one, by N vectors of pairs of B.
template <int M, int N>
TEA_PRIMITIVE void multiply_pairs(int64_t steps, const Tiles& a, const Tiles& b, float* c,
                                  int64_t ldc, bool add) {
  __m512 sum[M][N];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n)
      sum[m][n] = add ? _mm512_loadu_ps(c + m * ldc + n * kSide) : _mm512_setzero_ps();
  for (int m = M; m < 2 * M && add; ++m)  // the rows that come next
    for (int n = 0; n < N; ++n) __builtin_prefetch(c + m * ldc + n * kSide, 1);
  const char *left = a.at(0), *right = b.at(0);
  for (int64_t k = 0; k < steps; ++k, left += a.step, right += b.step)
#pragma GCC unroll 2
    for (int64_t i = 0; i < kDepth / 2; ++i) {
      __m512bh pairs[N];
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n)
        pairs[n] = (__m512bh)_mm512_loadu_si512(right + n * b.next + i * b.pitch);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        int32_t pair;
        __builtin_memcpy(&pair, left + m * a.pitch + 4 * i, sizeof pair);
        const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) sum[m][n] = _mm512_dpbf16_ps(sum[m][n], both, pairs[n]);
      }
    }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) _mm512_storeu_ps(c + m * ldc + n * kSide, sum[m][n]);
}

// C = or += A B in parts of two tiles of rows by four of columns; `rows` and `columns` count tiles,
// `steps` tiles of k. There is one term. Unlike with AMX, vector work does not run concurrently,
// because the same execution units do both.
template <int T>
struct Product {
  static_assert(T == 1);
  int64_t rows, columns, steps;
  Tiles a, b;
  float* c;
  int64_t ldc;
  bool add;

  static constexpr int64_t kLeastPanel = 4 * kDepth;
  static constexpr int64_t parts_of(int64_t m, int64_t n) {
    return tiles_of(m, 2) * tiles_of(n, 4);
  }
  int64_t parts() const { return parts_of(rows, columns); }

  template <class Between = const Nothing>
  void part(int64_t i, const Between& = {}) const {
    const int64_t m = i / tiles_of(columns, 4) * 2, n = i % tiles_of(columns, 4) * 4;
    switch (std::min<int64_t>(columns - n, 4)) {
      case 1:
        return strip<1>(m, n);
      case 2:
        return strip<2>(m, n);
      case 3:
        return strip<3>(m, n);
      default:
        return strip<4>(m, n);
    }
  }
  template <class Between = const Nothing>
  void operator()(const Between& = {}) const {
    for (int64_t i = 0; i < parts(); ++i) part(i);
  }

 private:
  // Two tiles of rows from m on, N tiles of columns from n on.
  template <int N>
  void strip(int64_t m, int64_t n) const {
    constexpr int kHeight = N == 1 ? 8 : 4;
    const Tiles right{b.at(n), b.next, b.step, b.pitch};
    for (int64_t tile = m; tile < std::min(m + 2, rows); ++tile)
      for (int row = 0; row < kSide; row += kHeight) {
        const Tiles left{a.at(tile) + row * a.pitch, a.next, a.step, a.pitch};
        multiply_pairs<kHeight, N>(steps, left, right, c + (tile * kSide + row) * ldc + n * kSide,
                                   ldc, add);
      }
  }
};
