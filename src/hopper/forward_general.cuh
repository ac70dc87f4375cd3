// What the general kernels do to scores and probabilities: bias, scale, soft cap, ALiBi, dropout,
// in the order of docs/semantics.md. A thread works on its elements of a block of 64 rows.
#pragma once
#include "hopper/forward_cap.cuh"
#include "hopper/forward_dropout.cuh"
#include "math/bias.h"

namespace tea::hopper {

// What changes scores needs them as natural logarithms, and so does a scale that turns them around;
// else they stay products.
__host__ __device__ inline bool bends(const Forward& f) {
  const General& g = f.general;
  return g.bias || g.softcap > 0 || g.alibi || !(f.scale > 0);
}

// A soft cap is what bends scores last: then they stay as cap_scores() leaves them.
__host__ __device__ inline bool caps_last(const Forward& f) {
  const General& g = f.general;
  return g.softcap > 0 && !g.alibi && !(g.bias && !g.bias_before_scale);
}

// Scores as the softmax gets them are natural logarithms of weights times a factor and shifted.
__host__ __device__ inline Unit unit_of(const Forward& f) {
  const float cap = f.general.softcap;
  return caps_last(f) ? Unit{2 * cap, cap} : Unit{bends(f) ? 1 : f.scale, 0};
}

// By the planner: what is the same for a whole tile.
TEA_DEVICE void add_general(Work& w, const Forward& f) {
  const General& g = f.general;
  w.slope = !g.alibi   ? 0
            : g.slopes ? g.slopes[w.sequence * g.slopes_batch + w.head]
                       : static_cast<float>(alibi_slope(w.head, f.heads));
  if (g.bias) {
    const int64_t at = w.sequence * g.bias_batch + w.head * g.bias_head + w.skipped * g.bias_col;
    w.bias = static_cast<const char*>(g.bias) + at * (g.bias_is_fp32 ? 4 : 2);
    w.bias_head = g.bias_head ? w.head : 0;
    w.bias_sequence = g.bias_batch ? w.sequence : 0;
  }
  if (g.dropout > 0) add_dropout(w, f);
}

// The bias of a block of 64 rows, as the copy engine leaves it in shared memory: slabs of 32
// columns. Where all rows share a bias there is only one row; where the copy engine cannot address
// it, none.
struct BiasTile {
  static constexpr Swizzle kSwizzle = Swizzle::k64;
  static constexpr int kColumns = 32, kSlab = 64 * width(kSwizzle);
  static constexpr int bytes(int columns) { return columns / kColumns * kSlab; }
  const uint8_t* data;
  int rows;
};

template <Type kType>
TEA_DEVICE float widen(uint32_t bits) {
  if constexpr (kType == Type::kBf16) return __uint_as_float(bits << 16);
  return float_of_half(static_cast<uint16_t>(bits));
}

// s = factor * s + bias, from shared memory.
template <Type kType, int kCount>
TEA_DEVICE void add_bias(float (&s)[kCount], float factor, const BiasTile& bias) {
  const int row = bias.rows > 1 ? 16 * warp_of_group() + lane() % 16 : 0;
  const uint32_t from = shared_address(bias.data);
#pragma unroll
  for (int c = 0; c < kCount / 8; ++c) {
    uint32_t pair[4];  // of columns 16c.., in the order of the accumulator
    load_matrices(pair, from + c / 2 * BiasTile::kSlab +
                            swizzled(BiasTile::kSwizzle, row, c % 2 * 32 + lane() / 16 * 16));
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const uint32_t bits = k % 2 ? pair[k / 2] >> 16 : pair[k / 2] & 0xFFFF;
      s[8 * c + k] = fmaf(s[8 * c + k], factor, widen<kType>(bits));
    }
  }
}
// The same from where it lies, with any strides, as the float or the 16 bits of kStored, where
// `seen` has it.
template <Type kStored, int kCount>
TEA_DEVICE void add_bias(float (&s)[kCount], float factor, const General& g, const Work& w,
                         Corner at, const uint32_t (&seen)[2]) {
  constexpr int kSize = kStored == Type::kFp32 ? 4 : 2;
  const char* row[2];
  for (int r = 0; r < 2; ++r)
    row[r] = w.bias + ((at.row + 8 * r) * g.bias_row + at.key * g.bias_col) * kSize;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    s[i] *= factor;
    if (!(seen[half_of(i)] >> number_in_row(i) & 1)) continue;
    const char* const p = row[half_of(i)] + (i / 4 * 8 + i % 2) * g.bias_col * kSize;
    float b;
    if constexpr (kStored == Type::kFp32)
      b = *reinterpret_cast<const float*>(p);
    else
      b = widen<kStored>(*reinterpret_cast<const uint16_t*>(p));
    s[i] += b;
  }
}

// Turns products of queries and keys into scores in units of unit_of(). seen: columns_between().
// Where caps_last(), highest are the largest that the thread sees in its rows.
// Each option has a loop of its own: what a problem lacks costs a branch, not one per element.
template <Type kType, bool kBias, int kCount>
TEA_DEVICE void bend(float (&s)[kCount], const Forward& f, const Work& w, Corner at,
                     const uint32_t (&seen)[2], const BiasTile& bias, float (&highest)[2]) {
  const General& g = f.general;
  const auto each = [&](auto&& change) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) s[i] = change(s[i], i);
  };
  const auto biased = [&](float factor) {
    if (bias.rows)
      add_bias<kType>(s, factor, bias);
    else if (g.bias_is_fp32)
      add_bias<Type::kFp32>(s, factor, g, w, at, seen);
    else
      add_bias<kType>(s, factor, g, w, at, seen);
  };
  if (kBias && g.bias_before_scale) biased(1);
  float factor = f.scale;  // by which scores are still to be multiplied
  if (g.softcap > 0) {
    factor *= cap_unit(g.softcap);
    each([&](float x, int) { return x * factor; });
    if ((seen[0] & seen[1]) != ~0u)
      each([&](float x, int i) {  // what is not seen may be no number
        return seen[half_of(i)] >> number_in_row(i) & 1 ? x : kMinusInfinity;
      });
    cap_scores(s, highest);
    if (caps_last(f)) {
#pragma unroll
      for (int r = 0; r < 2; ++r)
        if (!seen[r]) highest[r] = kMinusInfinity;
      return;
    }
    each([&](float x, int) { return fmaf(2 * g.softcap, x, g.softcap); });
    factor = 1;
  }
  if (kBias && !g.bias_before_scale)
    biased(factor);
  else if (factor != 1)
    each([&](float x, int) { return x * factor; });
  if (g.alibi) {
    const float distance = static_cast<float>(w.diagonal + at.row - at.key);
    each([&](float x, int i) {
      const auto from = static_cast<float>(8 * half_of(i) - i / 4 * 8 - i % 2);
      return fmaf(-w.slope, fabsf(distance + from), x);
    });
  }
}

}  // namespace tea::hopper
