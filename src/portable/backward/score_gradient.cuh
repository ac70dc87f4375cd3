// From scores in an accumulator (device/accumulator.cuh) to P and dS.
#pragma once
#include "portable/backward/buffers.cuh"
#include "portable/dropout.cuh"
#include "portable/score_mod.cuh"

namespace tea::portable {

// The factors of each product: 1 except for the softmax scale, dropout and the scales of FP8.
struct BackwardScales {
  ScoreScale scores;
  float dp;               // dO V^T
  float p_cast, ds_cast;  // P, only for FP8, and dS, before they are rounded to operands
  float ds;               // dS, before its amax is recorded
  float dq, dk, dv;       // the accumulators
};
// kPlain: neither FP8 nor dropout, known at compile time.
template <bool kPlain = false>
TEA_DEVICE BackwardScales backward_scales(const AttentionArguments& args) {
  const Fp8Scales& s = args.fp8;
  if (kPlain || !is_fp8(args.q.dtype))
    // With scale 0, dQ and dK are 0 whatever dS is. dS is multiplied by 0 as fp32, because it may
    // exceed fp16: applied to the accumulators alone, the scale would make NaN of their infinities.
    return {.scores = {1, args.scale},
            .dp = 1,
            .p_cast = 1,
            .ds_cast = kPlain || args.scale != 0 ? 1.0f : 0.0f,
            .ds = 1,
            .dq = args.scale,
            .dk = args.scale,
            .dv = kPlain ? 1.0f : args.keep_factor};
  const float q = scalar_or_1(s.q_inv), k = scalar_or_1(s.k_inv), dout = scalar_or_1(s.dout_inv),
              dp = scalar_or_1(s.dp_inv);
  return {.scores = {q * k, args.scale},
          .dp = dout * scalar_or_1(s.v_inv),
          .p_cast = scalar_or_1(s.s),
          .ds_cast = scalar_or_1(s.dp),
          .ds = args.scale,
          .dq = dp * k,
          .dk = dp * q,
          .dv = scalar_or_1(s.s_inv) * dout};
}

// The values of a query head that score modifications and dropout need.
struct HeadModifiers {
  int64_t head;
  float slope;  // of ALiBi
  DropoutState dropout;
};
TEA_DEVICE HeadModifiers head_modifiers(const AttentionArguments& args, const SequencePair& seq,
                                        int64_t head) {
  return {head, slope_of(args, seq.batch, head), dropout_state(args, seq.batch, head)};
}

// exp(score - LSE), which is at most 1. Where both are huge, the rounding error of their difference
// is clamped to that.
TEA_DEVICE float probability(float score, float scale_log2, float lse2) {
  return exp2_fast(min_or_nan(fmaf(score, scale_log2, -lse2), 0.0f));
}

// P and dS of 16 rows by 8 kTiles columns, of which the first is at (row, column) of a sequence,
// for every option. The sign of an element of P says whether dropout keeps it.
template <int kTiles>
struct ScoreGradient {
  const AttentionArguments& args;
  const SequencePair& seq;
  const HeadModifiers& head;
  int64_t row, column;

  TEA_DEVICE void visible_ranges(VisibleRange (&visible)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r)
      visible[r] = visible_range(seq, row + accumulator_row(2 * r), column, 8 * kTiles);
  }

  // Replaces products of Q and K by P. `cap_slope`: the derivative of the soft cap.
  TEA_DEVICE void compute_p(float (&x)[kTiles][4], float (&cap_slope)[kTiles][4],
                            const ScoreScale& scale, const float (&lse2)[2]) const {
    VisibleRange visible[2];
    ScoreModRow rows[2];
    visible_ranges(visible);
#pragma unroll
    for (int r = 0; r < 2; ++r)
      rows[r] = score_mod_row(args, seq, head.head, row + accumulator_row(2 * r), head.slope);
    modify_scores(x, args, seq, scale, rows, visible, column, cap_slope);
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool is_visible = visible[row_slot(i)].contains(accumulator_column(n, i));
        x[n][i] = is_visible ? probability(x[n][i], kLog2E, lse2[row_slot(i)]) : 0.0f;
      }
    if (args.rng)
      for_each_dropout(x, head.dropout, row + seq.origin_row, column + seq.origin_col,
                       [](float p, bool keeps) { return keeps ? p : -p; });
  }
  static TEA_DEVICE bool is_kept(float p) { return __float_as_int(p) >= 0; }

  // P as the operand of dV = P^T dO. The keep factor of dropout may be 65536, more than half
  // precision holds, so it is applied to dV; for FP8 it is applied before P is rounded, because the
  // scale of P is that of the product.
  TEA_DEVICE float p_operand(float p, float cast) const {
    const float x = is_kept(p) ? p : 0.0f;
    return is_fp8(args.q.dtype) ? cast_fp8(x * args.keep_factor * cast, args.q.dtype) : x;
  }

  // Replaces P, which may have been multiplied by the derivative of the soft cap, by the gradient
  // of the score.
  TEA_DEVICE void compute_ds(float (&p)[kTiles][4], const float (&dp)[kTiles][4], float factor,
                             const float (&delta)[2]) const {
    VisibleRange visible[2];
    visible_ranges(visible);
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool is_visible = visible[row_slot(i)].contains(accumulator_column(n, i));
        const float dprob = is_kept(p[n][i]) ? dp[n][i] * factor * args.keep_factor : 0.0f;
        p[n][i] = is_visible ? fabsf(p[n][i]) * (dprob - delta[row_slot(i)]) : 0.0f;
      }
  }
  // dS as the operand of dQ = dS K and dK = dS^T Q. `amax`: updated for FP8.
  TEA_DEVICE float ds_operand(float ds, const BackwardScales& scales, float* amax) const {
    if (!is_fp8(args.q.dtype)) return ds * scales.ds_cast;
    const float scaled = ds * scales.ds;
    *amax = fmaxf(*amax, fabsf(scaled));
    return cast_fp8(scaled * scales.ds_cast, args.dp_dtype);
  }
};

}  // namespace tea::portable
