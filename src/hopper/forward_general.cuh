// What the general kernels do to scores and probabilities: bias, scale, soft cap, ALiBi, dropout,
// in the order of docs/semantics.md. A thread works on its elements of a block of 64 rows.
#pragma once
#include "hopper/forward_work.cuh"
#include "math/bias.h"
#include "math/dropout.h"

namespace tea::hopper {

// What changes scores needs them as natural logarithms, and so does a scale that turns them around;
// else they stay products.
__host__ __device__ inline bool bends(const Forward& f) {
  const General& g = f.general;
  return g.bias || g.softcap > 0 || g.alibi || !(f.scale > 0);
}

// By the planner: what is the same for a whole tile.
TEA_DEVICE void add_general(Work& w, const Forward& f) {
  const General& g = f.general;
  bool sane;
  w.slope = !g.alibi   ? 0
            : g.slopes ? g.slopes[w.sequence * g.slopes_batch + w.head]
                       : static_cast<float>(alibi_slope(w.head, f.heads));
  if (g.bias) {
    const int64_t at = w.sequence * g.bias_batch + w.head * g.bias_head + w.skipped * g.bias_col;
    w.bias = static_cast<const char*>(g.bias) + at * (g.bias_is_fp32 ? 4 : 2);
    w.bias_has_runs = !g.bias_is_fp32 && g.bias_col == 1 && g.bias_row % 8 == 0 &&
                      reinterpret_cast<uintptr_t>(w.bias) % 16 == 0;
  }
  if (g.dropout > 0) {
    w.rng = {static_cast<uint64_t>(g.rng_state[0]), static_cast<uint64_t>(g.rng_state[1])};
    w.stream = dropout_stream(w.sequence + origin_of(f, 0, &sane), w.head + origin_of(f, 1, &sane));
  }
}

// The thread's elements begin at this row of the sequence and this key of the tile.
struct Corner {
  int row, key;
};

// c * tanh(s / c) = c - 2c / (1 + e^(2s/c)) to a few units of c, of s in units of which this is
// 2^s: cap_unit(). Four elements of a row share a division, since exponentials are what there is
// too few of; up to 2^30 each, where tanh is 1, their product is in range.
TEA_DEVICE float cap_unit(float cap) { return 2 * kLog2E / cap; }
template <int kCount>
TEA_DEVICE void cap_scores(float (&s)[kCount], float cap) {
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    const int first = i / 8 * 8 + i / 4 % 2 * 2;
    float x[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) x[k] = 1 + exp2_fast(min_or_nan(s[first + k / 2 * 4 + k % 2], 30));
    const float low = x[0] * x[1], high = x[2] * x[3], all = reciprocal_fast(low * high);
    const float over_low = all * high, over_high = all * low;
    const float over[4] = {over_low * x[1], over_low * x[0], over_high * x[3], over_high * x[2]};
#pragma unroll
    for (int k = 0; k < 4; ++k) s[first + k / 2 * 4 + k % 2] = fmaf(-2 * cap, over[k], cap);
  }
}

// The bias of a thread's two rows in a block, asked for before the products it is added to. Thread
// q of a quad asks for columns 32 i + 8 q and the seven next of them; then the quad deals out.
template <int kCols>
struct BiasRuns {
  static constexpr int kRuns = (kCols + 31) / 32;
  uint32_t run[2][kRuns][4];  // then: of columns 32 i + 8 k, for each k, the thread's two

  // Zeros where there is nothing to ask for: registers that keep what they held are not free.
  TEA_DEVICE void ask(const Forward& f, const Work& w, int row, int block, bool in_runs) {
    const int column = lane() % 4 * 8, key = block * kCols + column;
    const int64_t step = f.general.bias_row * 2;
    const char* const from = w.bias + row * step + key * 2;
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int i = 0; i < kRuns; ++i)
        read_run(
            run[r][i], from + 8 * r * step + 64 * i,
            in_runs && row + 8 * r < w.rows && key + 32 * i < w.keys && column + 32 * i < kCols);
  }
  TEA_DEVICE void deal() {
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int i = 0; i < kRuns; ++i) quad_transpose(run[r][i]);
  }
};

template <Type kType>
TEA_DEVICE float widen(uint32_t bits) {
  if constexpr (kType == Type::kBf16) return __uint_as_float(bits << 16);
  return float_of_half(static_cast<uint16_t>(bits));
}

// s += factor * bias.
template <Type kType, int kCount>
TEA_DEVICE void add_bias(float (&s)[kCount], float factor, const BiasRuns<2 * kCount>& bias) {
#pragma unroll
  for (int i = 0; i < kCount; i += 2) {
    const uint32_t both = bias.run[half_of(i)][i / 16][i / 4 % 4];
    s[i] = fmaf(widen<kType>(both & 0xFFFF), factor, s[i]);
    s[i + 1] = fmaf(widen<kType>(both >> 16), factor, s[i + 1]);
  }
}
// The same of any strides, as the float or the 16 bits of kStored, where `seen` has it.
template <Type kStored, int kCount>
TEA_DEVICE void add_bias(float (&s)[kCount], float factor, const General& g, const Work& w,
                         Corner at, const uint32_t (&seen)[2]) {
  constexpr int kSize = kStored == Type::kFp32 ? 4 : 2;
  const char* row[2];
  for (int r = 0; r < 2; ++r)
    row[r] = w.bias + ((at.row + 8 * r) * g.bias_row + at.key * g.bias_col) * kSize;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (!(seen[half_of(i)] >> number_in_row(i) & 1)) continue;
    const char* const p = row[half_of(i)] + (i / 4 * 8 + i % 2) * g.bias_col * kSize;
    float b;
    if constexpr (kStored == Type::kFp32)
      b = *reinterpret_cast<const float*>(p);
    else
      b = widen<kStored>(*reinterpret_cast<const uint16_t*>(p));
    s[i] = fmaf(b, factor, s[i]);
  }
}

// Turns products of queries and keys into natural logarithms of weights. seen: columns_between().
// Each option has a loop of its own: what a problem lacks costs a branch, not one per element.
// kBias: there is one; in_runs: and it is in `runs`.
template <Type kType, bool kBias, int kCount>
TEA_DEVICE void bend(float (&s)[kCount], const Forward& f, const Work& w, Corner at,
                     const uint32_t (&seen)[2], const BiasRuns<2 * kCount>& runs, bool in_runs) {
  const General& g = f.general;
  const auto each = [&](auto&& change) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) s[i] = change(s[i], i);
  };
  const float unit = g.softcap > 0 ? cap_unit(g.softcap) : 1;
  each([&](float x, int) { return x * (f.scale * unit); });
  const auto cap = [&] {
    if (!(g.softcap > 0)) return;
    if ((seen[0] & seen[1]) != ~0u)
      each([&](float x, int i) {  // what is not seen may be no number
        return seen[half_of(i)] >> number_in_row(i) & 1 ? x : 0;
      });
    cap_scores(s, g.softcap);
  };
  if constexpr (kBias) {
    if (!g.bias_before_scale) cap();
    const float factor = g.bias_before_scale ? f.scale * unit : 1;
    if (in_runs)
      add_bias<kType>(s, factor, runs);
    else if (g.bias_is_fp32)
      add_bias<Type::kFp32>(s, factor, g, w, at, seen);
    else
      add_bias<kType>(s, factor, g, w, at, seen);
    if (g.bias_before_scale) cap();
  } else {
    cap();
  }
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
  const RngState rng = w.rng;
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
