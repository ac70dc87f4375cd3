// One blocked product serves all three: A and B are read through strides, so that x and x^T are the
// same code. A strip of B is packed, so that it is contiguous in the L1 cache, and the sums
// of a tile of C stay in registers, which every instruction set fills in its own way.
#include "matmul.h"

#include <algorithm>
#include <cassert>
#include <cstring>

#define GPT_INLINE inline __attribute__((always_inline))

namespace gpt {
namespace {

// C [m, n] (+)= A [m, k] B [k, n]
struct Product {
  int64_t m, k, n;
  const float* a;
  int64_t a_row, a_col;  // strides of A
  const float* b;
  int64_t b_row, b_col;
  float* c;
  bool add;
};

constexpr int64_t kDeep = 128;  // of k at a time: 128 x 64 floats of B are 32 KiB

// Vectors of kLanes floats; tiles of C of kTall rows by kWide vectors.
template <int kLanes, int kTall, int kWide>
class Blocked {
 public:
  static GPT_INLINE void multiply(const Product& p) {
    alignas(64) float strip[kDeep * kColumns];
    for (int64_t k = 0; k < p.k; k += kDeep)
      for (int64_t j = 0; j < p.n; j += kColumns) {
        const int64_t deep = std::min(kDeep, p.k - k), wide = std::min(kColumns, p.n - j);
        pack(p, k, deep, j, wide, strip);
        const float* a = p.a + k * p.a_col;
        const bool add = p.add || k > 0;
        int64_t i = 0;
        for (; i + kTall <= p.m; i += kTall) tile<kTall>(p, a, i, deep, strip, j, wide, add);
        for (; i < p.m; ++i) tile<1>(p, a, i, deep, strip, j, wide, add);
      }
  }

 private:
  static constexpr int64_t kColumns = kLanes * kWide;
  typedef float Vector __attribute__((vector_size(kLanes * sizeof(float))));

  // Rows [k, k + deep) and columns [j, j + wide) of B; columns that complete the strip are zero.
  static GPT_INLINE void pack(const Product& p, int64_t k, int64_t deep, int64_t j, int64_t wide,
                              float* strip) {
    const float* b = p.b + k * p.b_row + j * p.b_col;
    if (wide < kColumns) std::fill_n(strip, deep * kColumns, 0.0f);
    if (p.b_col == 1) {
      for (int64_t x = 0; x < deep; ++x) std::copy_n(b + x * p.b_row, wide, strip + x * kColumns);
      return;
    }
    for (int64_t c = 0; c < wide; ++c)
      for (int64_t x = 0; x < deep; ++x) strip[x * kColumns + c] = b[x * p.b_row + c * p.b_col];
  }

  template <int kRows>
  static GPT_INLINE void tile(const Product& p, const float* a, int64_t i, int64_t deep,
                              const float* strip, int64_t j, int64_t wide, bool add) {
    Vector sum[kRows][kWide] = {};
    a += i * p.a_row;
    for (int64_t x = 0; x < deep; ++x, a += p.a_col, strip += kColumns) {
      Vector b[kWide];
      std::memcpy(b, strip, sizeof b);
      for (int r = 0; r < kRows; ++r)
        for (int v = 0; v < kWide; ++v) sum[r][v] += a[r * p.a_row] * b[v];
    }
    for (int r = 0; r < kRows; ++r) {
      float row[kColumns];
      std::memcpy(row, sum[r], sizeof row);
      float* out = p.c + (i + r) * p.n + j;
      if (add)
        for (int64_t c = 0; c < wide; ++c) out[c] += row[c];
      else
        for (int64_t c = 0; c < wide; ++c) out[c] = row[c];
    }
  }
};

// The widest instruction set of the machine that runs it, whichever machine built it.
#if defined(__x86_64__) && defined(__GNUC__)
__attribute__((target("avx512f,prefer-vector-width=512"))) void multiply_512(const Product& p) {
  Blocked<16, 6, 4>::multiply(p);
}
__attribute__((target("avx2,fma"))) void multiply_256(const Product& p) {
  Blocked<8, 6, 2>::multiply(p);
}
#endif
void multiply_any(const Product& p) { Blocked<4, 4, 2>::multiply(p); }

void multiply(const Product& p) {
#if defined(__x86_64__) && defined(__GNUC__)
  if (__builtin_cpu_supports("avx512f")) return multiply_512(p);
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return multiply_256(p);
#endif
  multiply_any(p);
}

[[maybe_unused]] bool fits(const Linear& s, size_t x, size_t w, size_t y) {
  return int64_t(x) == s.rows * s.in && int64_t(w) == s.in * s.out && int64_t(y) == s.rows * s.out;
}

}  // namespace

void matmul(const Linear& s, In x, In w, Out y) {
  assert(fits(s, x.size(), w.size(), y.size()));
  multiply({s.rows, s.in, s.out, x.data(), s.in, 1, w.data(), s.out, 1, y.data(), false});
}

void matmul_backward_input(const Linear& s, In dy, In w, Out dx) {
  assert(fits(s, dx.size(), w.size(), dy.size()));
  multiply({s.rows, s.out, s.in, dy.data(), s.out, 1, w.data(), 1, s.out, dx.data(), false});
}

void matmul_backward_weight(const Linear& s, In x, In dy, Out dw) {
  assert(fits(s, x.size(), dw.size(), dy.size()));
  multiply({s.in, s.rows, s.out, x.data(), 1, s.in, dy.data(), s.out, 1, dw.data(), true});
}

}  // namespace gpt
