// What the general kernels do to scores and probabilities: bias, scale, soft cap, ALiBi, dropout,
// in the order of docs/semantics.md. A thread works on its elements of a block of 64 rows.
#pragma once
#include "hopper/forward_work.cuh"
#include "math/bias.h"
#include "math/dropout.h"

namespace tea::hopper {

// By the planner: what is the same for a whole tile.
TEA_DEVICE void add_general(Work& w, const Forward& f) {
  const General& g = f.general;
  bool sane;
  w.stream = dropout_stream(w.sequence + origin_of(f, 0, &sane), w.head + origin_of(f, 1, &sane));
  w.slope = !g.alibi   ? 0
            : g.slopes ? g.slopes[w.sequence * g.slopes_batch + w.head]
                       : static_cast<float>(alibi_slope(w.head, f.heads));
}

// c * tanh(x / c) to a few units of c: near zero by its series, where 1 - 2 / (1 + e^2y) cancels.
TEA_DEVICE float capped(float x, float cap, float inverse) {
  const float y = x * inverse, square = y * y;
  const float far = 1 - 2 * reciprocal_fast(1 + exp2_fast(2 * kLog2E * y));
  const float near = fmaf(y * square, fmaf(square, 2.0f / 15, -1.0f / 3), y);
  return cap * (fabsf(y) < 0.1f ? near : far);
}

// The thread's elements begin at this row of the sequence and this key of the tile.
struct Corner {
  int row, key;
};

// Where the bias of the thread's elements lies, of any type and strides.
template <Type kType>
struct BiasReader {
  const General& g;
  const char* row[2];  // of the thread's two rows, at the corner
  bool pairs;

  TEA_DEVICE BiasReader(const Forward& f, const Work& w, Corner at) : g(f.general) {
    const int size = g.bias_is_fp32 ? 4 : 2;
    const int64_t base =
        w.sequence * g.bias_batch + w.head * g.bias_head + (w.skipped + at.key) * g.bias_col;
    for (int r = 0; r < 2; ++r)
      row[r] = static_cast<const char*>(g.bias) + (base + (at.row + 8 * r) * g.bias_row) * size;
    const auto either = reinterpret_cast<uintptr_t>(row[0]) | reinterpret_cast<uintptr_t>(row[1]);
    pairs = g.bias_col == 1 && either % (2 * size) == 0;
  }
  static TEA_DEVICE float widen(uint32_t bits) {
    if constexpr (kType == Type::kBf16) return __uint_as_float(bits << 16);
    return float_of_half(static_cast<uint16_t>(bits));
  }
  TEA_DEVICE float one(const char* p) const {
    return g.bias_is_fp32 ? *reinterpret_cast<const float*>(p)
                          : widen(*reinterpret_cast<const uint16_t*>(p));
  }
  // Two neighbours, at once where they are contiguous; bits of `seen`: which of them to read.
  TEA_DEVICE void read(float (&to)[2], int r, int column, uint32_t seen) const {
    to[0] = to[1] = 0;
    if (pairs && seen == 3) {
      if (g.bias_is_fp32) {
        const float2 both = *reinterpret_cast<const float2*>(row[r] + column * 4);
        to[0] = both.x;
        to[1] = both.y;
      } else {
        const uint32_t both = *reinterpret_cast<const uint32_t*>(row[r] + column * 2);
        to[0] = widen(both & 0xFFFF);
        to[1] = widen(both >> 16);
      }
      return;
    }
    const int64_t step = g.bias_col * (g.bias_is_fp32 ? 4 : 2);
    if (seen & 1) to[0] = one(row[r] + column * step);
    if (seen & 2) to[1] = one(row[r] + (column + 1) * step);
  }
};

// s += factor * bias, where `seen` has it.
template <Type kType, int kCount>
TEA_DEVICE void add_bias(float (&s)[kCount], float factor, const BiasReader<kType>& bias,
                         const uint32_t (&seen)[2]) {
#pragma unroll
  for (int i = 0; i < kCount; i += 2) {
    const int r = half_of(i);
    float b[2];
    bias.read(b, r, i / 4 * 8, seen[r] >> number_in_row(i) & 3);
    s[i] = fmaf(b[0], factor, s[i]);
    s[i + 1] = fmaf(b[1], factor, s[i + 1]);
  }
}

// Turns products of queries and keys into natural logarithms of weights. seen: columns_between().
// Each option has a loop of its own: what a problem lacks costs a branch, not one per element.
template <Type kType, int kCount>
TEA_DEVICE void bend(float (&s)[kCount], const Forward& f, const Work& w, Corner at,
                     const uint32_t (&seen)[2]) {
  const General& g = f.general;
  const auto each = [&](auto&& change) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) s[i] = change(s[i], i);
  };
  each([&](float x, int) { return x * f.scale; });
  if (g.bias && g.bias_before_scale) add_bias(s, f.scale, BiasReader<kType>(f, w, at), seen);
  if (g.softcap > 0) {
    const float inverse = 1 / g.softcap;
    each([&](float x, int) { return capped(x, g.softcap, inverse); });
  }
  if (g.bias && !g.bias_before_scale) add_bias(s, 1, BiasReader<kType>(f, w, at), seen);
  if (g.alibi) {
    const float distance = static_cast<float>(w.diagonal + at.row - at.key);
    each([&](float x, int i) {
      const auto from = static_cast<float>(8 * half_of(i) - i / 4 * 8 - i % 2);
      return fmaf(-w.slope, fabsf(distance + from), x);
    });
  }
}

// Probabilities that dropout takes become zero; the others are scaled at the end, with the row.
template <int kCount>
TEA_DEVICE void drop(float (&p)[kCount], const Forward& f, const Work& w, Corner at) {
  const RngState rng = {static_cast<uint64_t>(f.general.rng_state[0]),
                        static_cast<uint64_t>(f.general.rng_state[1])};
  const uint32_t threshold = dropout_threshold(f.general.dropout);
  const int64_t row = w.global_row + at.row, key = w.global_key + at.key;
  if ((w.global_row | w.global_key) % 16 == 0) {  // the tile's cells are dropout's
#pragma unroll
    for (int c = 0; c < kCount / 8; ++c) {
      const Philox4 cell = dropout_cell(rng, w.stream, row, key + 16 * c);
#pragma unroll
      for (int k = 0; k < 8; ++k)
        if (dropout_uniform(cell, half_of(k) * 8, k / 4 * 8 + k % 2) < threshold) p[8 * c + k] = 0;
    }
    return;
  }
  uint64_t kept = 0;
#pragma unroll 1
  for (int i = 0; i < kCount; ++i) {
    const int64_t column = key + i / 4 * 8 + i % 2;
    const bool keeps = dropout_keeps(rng, w.stream, row + 8 * half_of(i), column, threshold);
    kept |= uint64_t{keeps} << i;
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    if (!(kept >> i & 1)) p[i] = 0;
}

}  // namespace tea::hopper
