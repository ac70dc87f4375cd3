// Operands of products in bf16, packed into tiles: 16 rows of 64 bytes. C[16][16] of fp32 +=
// A[16][32] B[32][16] of bf16, where B is held as [16 pairs of k][16][2]. Included after
// amx_vectors.h, inside a namespace; what multiplies tiles comes next: amx.h or dots.h.
#pragma once

inline constexpr int kSide = 16;         // rows of a tile, and fp32 columns of C
inline constexpr int kDepth = 32;        // of k in one product of tiles
inline constexpr int kTileBytes = 1024;  // a packed tile: rows without a gap

constexpr int64_t tiles_of(int64_t n, int side) { return (n + side - 1) / side; }

// A matrix of tiles: the bytes from one tile to the next across the product (rows of A, columns of
// B), from one to the next along k, and from row to row inside a tile. If it is the sum of several
// terms, `term` is from one of them to the next.
struct Tiles {
  const void* data;
  int64_t next, step, pitch, term = 0;

  const char* at(int64_t n, int64_t k = 0) const {
    return static_cast<const char*>(data) + n * next + k * step;
  }
  const char* at(int64_t n, int64_t k, int t) const { return at(n, k) + t * term; }
};

template <int n>
using Number = std::integral_constant<int, n>;

struct Nothing {
  template <class From, class To>
  void operator()(From, To) const {}
};

// ------------------------------------------------------------------------------------- packing

// Which of the elements [from, from + 16) a row of n has. Null stands for a row of zeros.
TEA_PRIMITIVE __mmask16 first_16(int64_t from, int64_t n) {
  return static_cast<__mmask16>(n - from >= 16 ? 0xFFFF : (1u << (n - from)) - 1);
}

// How packing reads rows of bf16.
struct Bf16Rows {
  using Row = const uint16_t*;

  // Elements [from, from + 32) of a row of n.
  static __m512i load_32(Row row, int64_t from, int64_t n) {
    if (!row) return _mm512_setzero_si512();
    const int64_t left = n - from;
    if (left >= 32) return _mm512_loadu_si512(row + from);
    return _mm512_maskz_loadu_epi16((1u << left) - 1, row + from);
  }
  // Two rows of 16 elements, element by element.
  static __m512i paired(Row low, Row high, int64_t from, int64_t n) {
    return _mm512_or_si512(load_16(low, from, n), _mm512_slli_epi32(load_16(high, from, n), 16));
  }

 private:
  static __m512i load_16(Row row, int64_t from, int64_t n) {
    if (!row) return _mm512_setzero_si512();
    return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first_16(from, n), row + from));
  }
};

// How packing reads rows of fp32: one of the three terms of each element times `factor`.
template <int term>
struct Fp32Rows {
  using Row = const float*;
  float factor = 1;

  __m512i load_32(Row row, int64_t from, int64_t n) const {
    return joined(load_16(row, from, n), load_16(row, from + 16, n));
  }
  __m512i paired(Row low, Row high, int64_t from, int64_t n) const {
    return exact_pairs(load_16(low, from, n), load_16(high, from, n));
  }

 private:
  VF load_16(Row row, int64_t from, int64_t n) const {
    if (!row || from >= n) return VF{};
    const VF x = (VF)_mm512_maskz_loadu_ps(first_16(from, n), row + from) * factor;
    return Terms<3>(x).term[term];
  }
};

// 16 rows of 16 words, transposed, as a tile.
TEA_PRIMITIVE void store_transposed(V<float> (&row)[kSide], std::byte* to) {
  transpose_lanes<float>(row);
#pragma GCC unroll 16
  for (int i = 0; i < kSide; ++i) _mm512_store_si512(to + 64 * i, (__m512i)row[i]);
}

// 16 rows as tiles of A along their n elements.
template <class Rows>
void pack_rows(const Rows& of, const typename Rows::Row* rows, int64_t n, std::byte* to) {
  for (int64_t from = 0; from < n; from += kDepth, to += kTileBytes)
    for (int i = 0; i < kSide; ++i) _mm512_store_si512(to + 64 * i, of.load_32(rows[i], from, n));
}

// 16 rows as the columns of B: k runs along their elements, `step` bytes from tile to tile.
template <class Rows>
void pack_columns(const Rows& of, const typename Rows::Row* rows, int64_t n, std::byte* to,
                  int64_t step) {
  for (int64_t from = 0; from < n; from += kDepth, to += step) {
    V<float> row[kSide];
#pragma GCC unroll 16
    for (int i = 0; i < kSide; ++i) row[i] = (V<float>)of.load_32(rows[i], from, n);
    store_transposed(row, to);
  }
}

// 32 rows along k as tiles of B, one for every 16 elements.
template <class Rows>
void pack_pairs(const Rows& of, const typename Rows::Row* rows, int64_t n, std::byte* to) {
  for (int64_t from = 0; from < n; from += kSide, to += kTileBytes)
    for (int i = 0; i < kSide; ++i)
      _mm512_store_si512(to + 64 * i, of.paired(rows[2 * i], rows[2 * i + 1], from, n));
}

// 32 rows along k as tiles of A, whose rows are 16 of their elements.
template <class Rows>
void pack_transposed(const Rows& of, const typename Rows::Row* rows, int64_t n, std::byte* to) {
  for (int64_t from = 0; from < n; from += kSide, to += kTileBytes) {
    V<float> row[kSide];
#pragma GCC unroll 16
    for (int i = 0; i < kSide; ++i)
      row[i] = (V<float>)of.paired(rows[2 * i], rows[2 * i + 1], from, n);
    store_transposed(row, to);
  }
}
