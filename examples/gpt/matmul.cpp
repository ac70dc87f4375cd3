// One blocked product serves all three: A is read through strides, so that x and x^T are the same
// code, and the sums of a tile stay in registers.
#include "matmul.h"

#include <cassert>
#include <vector>

// The widest instruction set of the machine that runs it, whichever machine built it.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_THREAD__)
#define GPT_FOR_EACH_CPU \
  __attribute__((target_clones("arch=skylake-avx512", "arch=haswell", "default")))
#else
#define GPT_FOR_EACH_CPU
#endif
#define GPT_INLINE inline __attribute__((always_inline))

namespace gpt {
namespace {

constexpr int kTileRows = 4, kTileCols = 16;

struct Product {  // c[m, n] (+)= a[m, k] b[k, n]
  int64_t m, k, n;
  const float* a;
  int64_t a_row, a_col;  // strides of a
  const float* b;
  float* c;
  bool add;
};

// The loop over rows is the inner one: in this order gcc keeps `sum` in vector registers.
template <int kRows, int kCols>
GPT_INLINE void tile(const Product& p, int64_t i, int64_t j) {
  float sum[kRows][kCols] = {};
  const float* a = p.a + i * p.a_row;
  const float* b = p.b + j;
  for (int64_t x = 0; x < p.k; ++x, a += p.a_col, b += p.n) {
    for (int c = 0; c < kCols; ++c) {
      for (int r = 0; r < kRows; ++r) sum[r][c] += a[r * p.a_row] * b[c];
    }
  }
  for (int r = 0; r < kRows; ++r) {
    float* out = p.c + (i + r) * p.n + j;
    for (int c = 0; c < kCols; ++c) out[c] = sum[r][c] + (p.add ? out[c] : 0);
  }
}

template <int kCols>
GPT_INLINE void columns(const Product& p, int64_t j) {
  int64_t i = 0;
  for (; i + kTileRows <= p.m; i += kTileRows) tile<kTileRows, kCols>(p, i, j);
  for (; i < p.m; ++i) tile<1, kCols>(p, i, j);
}

GPT_FOR_EACH_CPU void multiply(const Product& p) {
  int64_t j = 0;
  for (; j + kTileCols <= p.n; j += kTileCols) columns<kTileCols>(p, j);
  for (; j < p.n; ++j) columns<1>(p, j);
}

[[maybe_unused]] bool fits(const Linear& s, size_t x, size_t w, size_t y) {
  return int64_t(x) == s.rows * s.in && int64_t(w) == s.in * s.out && int64_t(y) == s.rows * s.out;
}

}  // namespace

void matmul(const Linear& s, In x, In w, Out y) {
  assert(fits(s, x.size(), w.size(), y.size()));
  multiply({s.rows, s.in, s.out, x.data(), s.in, 1, w.data(), y.data(), false});
}

void matmul_backward_input(const Linear& s, In dy, In w, Out dx) {
  assert(fits(s, dx.size(), w.size(), dy.size()));
  std::vector<float> transposed(w.size());  // rows of b must be contiguous
  for (int64_t i = 0; i < s.in; ++i) {
    for (int64_t o = 0; o < s.out; ++o) transposed[o * s.in + i] = w[i * s.out + o];
  }
  multiply({s.rows, s.out, s.in, dy.data(), s.out, 1, transposed.data(), dx.data(), false});
}

void matmul_backward_weight(const Linear& s, In x, In dy, Out dw) {
  assert(fits(s, x.size(), dw.size(), dy.size()));
  multiply({s.in, s.rows, s.out, x.data(), 1, s.in, dy.data(), dw.data(), true});
}

}  // namespace gpt
