// Operations of the tiled kernels on rows and tiles: load and store rows of any type, transpose,
// multiply. Included once per instruction set, after simd.h.
#pragma once

// A row of any type as Real times `scale`.
template <class Real>
void load_row(const void* from, int32_t dtype, int64_t n, double scale, Real* to) {
  const auto factor = static_cast<Real>(scale);
  switch (dtype) {
    case TEA_FP32: {
      const auto* x = static_cast<const float*>(from);
      for (int64_t i = 0; i < n; ++i) to[i] = static_cast<Real>(x[i]) * factor;
      return;
    }
    case TEA_BF16: {
      const auto* x = static_cast<const uint16_t*>(from);
      for (int64_t i = 0; i < n; ++i) to[i] = static_cast<Real>(bf16_decode(x[i])) * factor;
      return;
    }
    case TEA_FP16: {
      const auto* x = static_cast<const uint16_t*>(from);
      for (int64_t i = 0; i < n; i += 8) {
        float wide[8];
        TEA_WIDEN_FP16(x + i, wide);
        for (int j = 0; j < 8; ++j) to[i + j] = static_cast<Real>(wide[j]) * factor;
      }
      return;
    }
    default:
      for (int64_t i = 0; i < n; ++i) to[i] = static_cast<Real>(load_real(from, dtype, i) * scale);
  }
}

template <class Real>
void store_row(void* to, int32_t dtype, int64_t n, const Real* from) {
  switch (dtype) {
    case TEA_FP32: {
      auto* y = static_cast<float*>(to);
      for (int64_t i = 0; i < n; ++i) y[i] = static_cast<float>(from[i]);
      return;
    }
    case TEA_BF16:
      if constexpr (sizeof(Real) == 4) {
        auto* y = static_cast<uint16_t*>(to);
        for (int64_t i = 0; i < n; ++i) y[i] = bf16_encode(from[i]);
        return;
      }
      [[fallthrough]];
    default:
      for (int64_t i = 0; i < n; ++i) store_real(to, dtype, i, static_cast<double>(from[i]));
  }
}

// x = cast(x * scale) * scale_inv, for the fp8 types.
template <class Real>
void cast_tile(Real* x, int64_t n, int32_t dtype, double scale, double scale_inv) {
  for (int64_t i = 0; i < n; ++i)
    x[i] = static_cast<Real>(cast_to_fp8(static_cast<double>(x[i]) * scale, dtype) * scale_inv);
}

template <class Real>
double largest(const Real* x, int64_t n) {
  Real high = 0;
  for (int64_t i = 0; i < n; ++i) high = std::fmax(high, std::fabs(x[i]));
  return static_cast<double>(high);
}

// One step of a transposition: exchanges bit S of the number of the row with that of the lane.
template <int S, class Real>
TEA_PRIMITIVE void transpose_step(V<Real> (&row)[kLanes<Real>]) {
  constexpr int n = kLanes<Real>;
  if constexpr (S < n) {
    I<Real> low, high;
    for (int lane = 0; lane < n; ++lane) {
      low[lane] = lane & S ? n + lane - S : lane;
      high[lane] = lane & S ? n + lane : lane + S;
    }
#pragma GCC unroll 16
    for (int i = 0; i < n; ++i) {
      if (i & S) continue;
      const V<Real> a = row[i], b = row[i + S];
      row[i] = __builtin_shuffle(a, b, low);
      row[i + S] = __builtin_shuffle(a, b, high);
    }
    transpose_step<2 * S, Real>(row);
  }
}

// As many rows as lanes.
template <class Real>
TEA_PRIMITIVE void transpose_lanes(V<Real> (&row)[kLanes<Real>]) {
  transpose_step<1, Real>(row);
}

// to[n][ld_to] = from[m][ld_from] transposed; m and n are multiples of the lanes.
template <class Real>
void transpose(const Real* from, int64_t ld_from, int64_t m, int64_t n, Real* to, int64_t ld_to) {
  for (int64_t i = 0; i < m; i += kLanes<Real>)
    for (int64_t j = 0; j < n; j += kLanes<Real>) {
      V<Real> row[kLanes<Real>];
#pragma GCC unroll 16
      for (int r = 0; r < kLanes<Real>; ++r) row[r] = load(from + (i + r) * ld_from + j);
      transpose_lanes<Real>(row);
#pragma GCC unroll 16
      for (int r = 0; r < kLanes<Real>; ++r) store(to + (j + r) * ld_to + i, row[r]);
    }
}

// An operand whose elements are read one by one: element (m, k) at data[m * row + k * col].
template <class Real>
struct Operand {
  const Real* data;
  int64_t row, col;
  Operand transposed() const { return {data, col, row}; }
};

// C[M][N vectors] = or += A B over k; B and C row-major. The sum over k starts at zero and is added
// to C once, so that errors grow with the length of a chunk of k, not with all of it.
template <int M, int N, class Real>
TEA_PRIMITIVE void multiply_micro(int64_t k, Operand<Real> a, const Real* b, int64_t ldb, Real* c,
                                  int64_t ldc, bool add) {
  V<Real> sum[M][N];
  for (int m = 0; m < M; ++m)
    for (int n = 0; n < N; ++n) sum[m][n] = V<Real>{};
  for (int m = 0; m < M; ++m)  // the rows that come next
    for (int64_t i = 0; i < k; i += 64 / static_cast<int64_t>(sizeof(Real)))
      __builtin_prefetch(a.data + (M + m) * a.row + i * a.col);
  for (int m = 0; m < M && add; ++m)
    for (int n = 0; n < N; ++n) __builtin_prefetch(c + (M + m) * ldc + n * kLanes<Real>, 1);
#pragma GCC unroll 2
  for (int64_t i = 0; i < k; ++i) {
    V<Real> right[N];
    for (int n = 0; n < N; ++n) right[n] = load(b + i * ldb + n * kLanes<Real>);
    for (int m = 0; m < M; ++m) {
      const V<Real> left = splat(a.data[m * a.row + i * a.col]);
      for (int n = 0; n < N; ++n) sum[m][n] += left * right[n];
    }
  }
  for (int m = 0; m < M; ++m)
    for (int n = 0; n < N; ++n) {
      Real* at = c + m * ldc + n * kLanes<Real>;
      store(at, add ? load(at) + sum[m][n] : sum[m][n]);
    }
}

// All rows of one strip of N vectors. kTall rows at a time fill the registers.
template <int N, class Real>
void multiply_strip(int64_t rows, int64_t k, Operand<Real> a, const Real* b, int64_t ldb, Real* c,
                    int64_t ldc, bool add) {
  int64_t m = 0;
  const auto left = [&] { return Operand<Real>{a.data + m * a.row, a.row, a.col}; };
  for (; m + kTall <= rows; m += kTall)
    multiply_micro<kTall, N>(k, left(), b, ldb, c + m * ldc, ldc, add);
  for (; m + 4 <= rows; m += 4) multiply_micro<4, N>(k, left(), b, ldb, c + m * ldc, ldc, add);
  for (; m + 2 <= rows; m += 2) multiply_micro<2, N>(k, left(), b, ldb, c + m * ldc, ldc, add);
  for (; m < rows; ++m) multiply_micro<1, N>(k, left(), b, ldb, c + m * ldc, ldc, add);
}

// C[rows][n] = or += A B; n is a multiple of the lanes.
template <class Real>
void multiply(int64_t rows, int64_t n, int64_t k, Operand<Real> a, const Real* b, int64_t ldb,
              Real* c, int64_t ldc, bool add) {
  constexpr int64_t wide = int64_t{kStrip} * kLanes<Real>, chunk = 64;
  int64_t at = 0;
  const auto strip = [&](auto width) {
    for (int64_t i = 0; i < k; i += chunk)
      multiply_strip<decltype(width)::value>(rows, std::min(chunk, k - i),
                                             {a.data + i * a.col, a.row, a.col}, b + at + i * ldb,
                                             ldb, c + at, ldc, add || i > 0);
    at += decltype(width)::value * kLanes<Real>;
  };
  while (at + wide <= n) strip(std::integral_constant<int, kStrip>{});
  while (at < n) strip(std::integral_constant<int, 1>{});
}
