// The words of the matrix unit (AMX): operands packed into tiles, and their products. A tile has 16
// rows of 64 bytes. C[16][16] of fp32 += A[16][32] B[32][16] of bf16, where B is held as
// [16 pairs of k][16][2]. Included by flash_amx.cpp after amx_vectors.h, inside its namespace.
#pragma once

inline constexpr int kSide = 16;         // rows of a tile, and fp32 columns of C
inline constexpr int kDepth = 32;        // of k in one product of tiles
inline constexpr int kTileBytes = 1024;  // a packed tile: rows without a gap

constexpr int64_t tiles_of(int64_t n, int side) { return (n + side - 1) / side; }

// The instructions, as words that the compiler does not move memory accesses across: those of GCC
// 12 do not say what they read.
template <int T>
TEA_WORD void load_tile(const void* from, int64_t pitch) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(pitch), "i"(T) : "memory");
}
template <int T>
TEA_WORD void store_tile(void* to, int64_t pitch) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(pitch), "i"(T) : "memory");
}
template <int T>
TEA_WORD void zero_tile() {
  asm volatile("tilezero %%tmm%c0" ::"i"(T));
}
template <int C, int A, int B>
TEA_WORD void multiply_tile() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

// All eight tile registers in their full size while this lives. The registers are the caller's
// again afterwards, and an idle unit costs nothing at a context switch.
class Configured {
 public:
  Configured() {
    alignas(64) uint8_t config[64] = {1};  // palette 1
    for (int i = 0; i < 8; ++i) config[16 + 2 * i] = 64, config[48 + i] = kSide;
    asm volatile("ldtilecfg %0" ::"m"(config));
  }
  ~Configured() { asm volatile("tilerelease"); }
  Configured(const Configured&) = delete;
  Configured& operator=(const Configured&) = delete;
};

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

// Which terms of A and B meet. One product after the other shares a term with the one before, which
// then is in its tiles already. Beside it the vectors do quarters [from, to) of their share of a
// step.
struct Round {
  int a, b;
  bool loads_a, loads_b;
  int from, to;
};

// bf16 is one term. fp32 is three, the largest first: what is left out, products of a second with a
// third and of two thirds, is below 2^-24 of the whole. The largest product comes last, so that a
// sum is rounded at its full size once.
template <int T>
inline constexpr Round kRounds[] = {{0, 0, true, true, 0, 4}};
template <>
inline constexpr Round kRounds<3>[] = {{2, 0, true, true, 0, 1},  {1, 0, true, false, 1, 1},
                                       {1, 1, false, true, 1, 2}, {0, 1, true, false, 2, 3},
                                       {0, 2, false, true, 3, 3}, {0, 0, false, true, 3, 4}};

// M x N products of tiles of one round at step k. `between` is called after each product with the
// quarters [from, to) of a step that are its share, if any.
template <int M, int N, int T, int I, class Between>
TEA_WORD void multiply_round(int64_t k, const Tiles& a, const Tiles& b, Between& between) {
  constexpr Round now = kRounds<T>[I];
  const auto done = [&]<int product>(Number<product>) __attribute__((always_inline)) {
    constexpr int from = now.from + (now.to - now.from) * product / (M * N);
    constexpr int to = now.from + (now.to - now.from) * (product + 1) / (M * N);
    if constexpr (from < to) between(Number<from>{}, Number<to>{});
  };
  if constexpr (now.loads_b) load_tile<6>(b.at(0, k, now.b), b.pitch);
  if constexpr (now.loads_a) load_tile<4>(a.at(0, k, now.a), a.pitch);
  multiply_tile<0, 4, 6>();
  done(Number<0>{});
  if constexpr (N > 1) {
    if constexpr (now.loads_b) load_tile<7>(b.at(1, k, now.b), b.pitch);
    multiply_tile<1, 4, 7>();
    done(Number<1>{});
  }
  if constexpr (M > 1) {
    if constexpr (now.loads_a) load_tile<5>(a.at(1, k, now.a), a.pitch);
    multiply_tile<2, 5, 6>();
    done(Number<N>{});
  }
  if constexpr (M > 1 && N > 1) {
    multiply_tile<3, 5, 7>();
    done(Number<3>{});
  }
}

// M x N tiles of C = or += A B over `steps` tiles of k, of T terms each. What `between` does on
// vectors runs beside the products.
template <int M, int N, int T, class Between>
TEA_WORD void multiply_tiles(int64_t steps, const Tiles& a, const Tiles& b, float* c, int64_t ldc,
                             bool add, Between& between) {
  const int64_t pitch = ldc * static_cast<int64_t>(sizeof(float));
  float* const below = c + kSide * ldc;
  if (add) {
    load_tile<0>(c, pitch);
    if constexpr (N > 1) load_tile<1>(c + kSide, pitch);
    if constexpr (M > 1) load_tile<2>(below, pitch);
    if constexpr (M > 1 && N > 1) load_tile<3>(below + kSide, pitch);
  } else {
    zero_tile<0>();
    if constexpr (N > 1) zero_tile<1>();
    if constexpr (M > 1) zero_tile<2>();
    if constexpr (M > 1 && N > 1) zero_tile<3>();
  }
  for (int64_t k = 0; k < steps; ++k)
    [&]<size_t... I>(std::index_sequence<I...>) __attribute__((always_inline)) {
      (multiply_round<M, N, T, static_cast<int>(I)>(k, a, b, between), ...);
    }
  (std::make_index_sequence<std::size(kRounds<T>)>{});
  store_tile<0>(c, pitch);
  if constexpr (N > 1) store_tile<1>(c + kSide, pitch);
  if constexpr (M > 1) store_tile<2>(below, pitch);
  if constexpr (M > 1 && N > 1) store_tile<3>(below + kSide, pitch);
}

struct Nothing {
  template <class From, class To>
  void operator()(From, To) const {}
};

// C = or += A B in parts of two by two tiles; `rows` and `columns` count tiles, `steps` tiles of k.
template <int T>
struct Product {
  int64_t rows, columns, steps;
  Tiles a, b;
  float* c;
  int64_t ldc;
  bool add;

  int64_t parts() const { return tiles_of(rows, 2) * tiles_of(columns, 2); }

  template <class Between = const Nothing>
  TEA_INLINE void part(int64_t i, Between&& between = {}) const {
    const int64_t m = i / tiles_of(columns, 2) * 2, n = i % tiles_of(columns, 2) * 2;
    const Tiles left{a.at(m), a.next, a.step, a.pitch, a.term};
    const Tiles right{b.at(n), b.next, b.step, b.pitch, b.term};
    float* to = c + m * kSide * ldc + n * kSide;
    const bool tall = m + 1 < rows, wide = n + 1 < columns;
    if (tall && wide) return multiply_tiles<2, 2, T>(steps, left, right, to, ldc, add, between);
    if (tall) return multiply_tiles<2, 1, T>(steps, left, right, to, ldc, add, between);
    if (wide) return multiply_tiles<1, 2, T>(steps, left, right, to, ldc, add, between);
    multiply_tiles<1, 1, T>(steps, left, right, to, ldc, add, between);
  }

  template <class Between = const Nothing>
  TEA_INLINE void operator()(Between&& between = {}) const {
    for (int64_t i = 0; i < parts(); ++i) part(i, between);
  }
};

// ------------------------------------------------------------------------------------- packing

// Which of the elements [from, from + 16) a row of n has. Null stands for a row of zeros.
TEA_WORD __mmask16 first_16(int64_t from, int64_t n) {
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
TEA_WORD void store_transposed(V<float> (&row)[kSide], std::byte* to) {
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
