// Score modifications of the general kernels: bias, scale, soft cap and ALiBi, in the order of
// docs/semantics.md. A thread works on its elements of a block of 64 rows.
#pragma once
#include "hopper/forward/dropout.cuh"
#include "hopper/forward/softcap.cuh"
#include "math/bias.h"

namespace tea::hopper {

// The unit of scores after all modifications.
TEA_HOST_DEVICE ScoreUnit score_unit(const AttentionArguments& a) {
  const float cap = a.softcap;
  return softcap_is_last(a) ? ScoreUnit{2 * cap, cap}
                            : ScoreUnit{modifies_scores(a) ? 1 : a.scale, 0};
}

// Called by the scheduler warp.
TEA_DEVICE void describe_score_mod(WorkTile& w, const AttentionArguments& a) {
  const BiasArguments& bias = a.bias;
  w.slope = slope_of(a, w.batch, w.head);
  if (bias.kind) {
    const int64_t at =
        w.batch * bias.stride.batch + w.head * bias.stride.head + w.skipped_keys * bias.stride.col;
    w.bias = static_cast<const char*>(bias.data) + at * (bias.dtype == TEA_FP32 ? 4 : 2);
    w.bias_head = bias.stride.head ? w.head : 0;
    w.bias_batch = bias.stride.batch ? w.batch : 0;
  }
  if (a.has_dropout) describe_dropout(w, a);
}

// The bias of a block of 64 rows in shared memory, as TMA stores it: slabs of 32 columns. `rows` is
// 1 where all rows share a bias, and 0 where TMA cannot address the bias.
struct BiasTile {
  static constexpr Swizzle kSwizzle = Swizzle::k64;
  static constexpr int kColumns = 32, kSlabBytes = 64 * width(kSwizzle);
  static constexpr int bytes(int columns) { return columns / kColumns * kSlabBytes; }
  const uint8_t* data;
  int rows;
};

template <Type kType>
TEA_DEVICE float to_float(uint32_t bits) {
  if constexpr (kType == Type::kBf16) return __uint_as_float(bits << 16);
  return half_to_float(static_cast<uint16_t>(bits));
}

// s = factor * s + bias, with the bias in shared memory.
template <Type kType, int kCount>
TEA_DEVICE void add_bias(float (&s)[kCount], float factor, const BiasTile& bias) {
  const int row = bias.rows > 1 ? 16 * warp_in_warpgroup() + lane() % 16 : 0;
  const uint32_t from = shared_address(bias.data);
#pragma unroll
  for (int c = 0; c < kCount / 8; ++c) {
    uint32_t pair[4];  // columns 16c to 16c + 15 in the layout of the accumulator
    ldmatrix_x4(pair, from + c / 2 * BiasTile::kSlabBytes +
                          swizzled(BiasTile::kSwizzle, row, c % 2 * 32 + lane() / 16 * 16));
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const uint32_t bits = k % 2 ? pair[k / 2] >> 16 : pair[k / 2] & 0xFFFF;
      s[8 * c + k] = fmaf(s[8 * c + k], factor, to_float<kType>(bits));
    }
  }
}
// The same with the bias in global memory, with any strides, in fp32 or the 16-bit type kStored.
// Only visible elements are read.
template <Type kStored, int kCount>
TEA_DEVICE void add_bias(float (&s)[kCount], float factor, const tea_bias_strides& stride,
                         const WorkTile& w, ElementOrigin at, const uint32_t (&visible)[2]) {
  constexpr int kSize = kStored == Type::kFp32 ? 4 : 2;
  const char* row[2];
  for (int r = 0; r < 2; ++r)
    row[r] = w.bias + ((at.row + 8 * r) * stride.row + at.key * stride.col) * kSize;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    s[i] *= factor;
    if (!(visible[row_slot(i)] >> index_in_row(i) & 1)) continue;
    const char* const p = row[row_slot(i)] + (i / 4 * 8 + i % 2) * stride.col * kSize;
    float b;
    if constexpr (kStored == Type::kFp32)
      b = *reinterpret_cast<const float*>(p);
    else
      b = to_float<kStored>(*reinterpret_cast<const uint16_t*>(p));
    s[i] += b;
  }
}

// Turns products of Q and K into scores in units of score_unit(). visible: see column_mask(). Where
// softcap_is_last(), `highest` is set to the maximum of the thread's visible scores in each row.
// Each modification has a loop of its own, so that an absent one costs a branch for all elements.
template <Type kType, bool kHasBias, int kCount>
TEA_DEVICE void modify_scores(float (&s)[kCount], const AttentionArguments& a, const WorkTile& w,
                              ElementOrigin at, const uint32_t (&visible)[2], const BiasTile& bias,
                              float (&highest)[2]) {
  const auto for_each = [&](auto&& change) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) s[i] = change(s[i], i);
  };
  const auto scale_and_add_bias = [&](float factor) {
    if (bias.rows)
      add_bias<kType>(s, factor, bias);
    else if (a.bias.dtype == TEA_FP32)
      add_bias<Type::kFp32>(s, factor, a.bias.stride, w, at, visible);
    else
      add_bias<kType>(s, factor, a.bias.stride, w, at, visible);
  };
  if (kHasBias && a.bias.kind == TEA_BIAS_PRE_SCALE) scale_and_add_bias(1);
  float factor = a.scale;  // by which scores remain to be multiplied
  if (a.softcap > 0) {
    factor *= softcap_unit(a.softcap);
    for_each([&](float x, int) { return x * factor; });
    if ((visible[0] & visible[1]) != ~0u)
      for_each([&](float x, int i) {  // a score that is not visible may be NaN
        return visible[row_slot(i)] >> index_in_row(i) & 1 ? x : kMinusInfinity;
      });
    softcap_scores(s, highest);
    if (softcap_is_last(a)) {
#pragma unroll
      for (int r = 0; r < 2; ++r)
        if (!visible[r]) highest[r] = kMinusInfinity;
      return;
    }
    for_each([&](float x, int) { return fmaf(2 * a.softcap, x, a.softcap); });
    factor = 1;
  }
  if (kHasBias && a.bias.kind == TEA_BIAS_POST_SCALE)
    scale_and_add_bias(factor);
  else if (factor != 1)
    for_each([&](float x, int) { return x * factor; });
  if (a.alibi) {
    const float distance = static_cast<float>(w.alibi_diagonal + at.row - at.key);
    for_each([&](float x, int i) {
      const auto from = static_cast<float>(8 * row_slot(i) - i / 4 * 8 - i % 2);
      return fmaf(-w.slope, fabsf(distance + from), x);
    });
  }
}

}  // namespace tea::hopper
