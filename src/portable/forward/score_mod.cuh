// Mask, score modifications, dropout and FP8 casts of a warp's scores.
#pragma once
#include "portable/dropout.cuh"
#include "portable/forward/work_tile.cuh"
#include "portable/score_mod.cuh"

namespace tea::portable {

// The visible keys of a row of the tile, for plain kernels: in 32 bits, relative to the tile's
// first row.
struct MaskBounds {
  int lo, hi, length;
  TEA_DEVICE int begin(int row) const { return lo + row; }
  TEA_DEVICE int end(int row) const { return min(hi + row, length); }
};

template <KernelConfig C>
struct ScoreMod {
  using T = Traits<C>;
  using Scores = typename T::Scores;

  struct AlibiSlopes {
    float of[T::kMmaM][2];
  };

  const WorkTile<C>& tile;

  TEA_DEVICE MaskBounds mask_bounds() const {
    const SequencePair& seq = tile.seq;
    const auto clamped = [](int64_t x) {
      return static_cast<int>(min(max(x, int64_t{-1} << 30), int64_t{1} << 30));
    };
    return {clamped(tile.index.first + seq.band.lo), clamped(tile.index.first + seq.band.hi + 1),
            clamped(seq.kv.length)};
  }
  // Plain kernels: masks a block unless all of its keys are visible to all of the warp's rows.
  TEA_DEVICE void apply_mask(Scores& s, const MaskBounds& bounds, int block) const {
    const int key = block * T::kBlockN;
    if (key >= bounds.begin(tile.row + 16 * T::kMmaM - 1) &&
        key + T::kBlockN <= bounds.end(tile.row))
      return;
#pragma unroll
    for (int m = 0; m < T::kMmaM; ++m) {
      VisibleRange visible[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int local = tile.thread_row(m, r);
        visible[r] = {bounds.begin(local) - key, bounds.end(local) - key};
      }
#pragma unroll
      for (int n = 0; n < T::kBlockN / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (!visible[row_slot(i)].contains(accumulator_column(n, i))) s[m][n][i] = kMinusInfinity;
    }
  }

  TEA_DEVICE AlibiSlopes alibi_slopes() const {
    AlibiSlopes slopes;
#pragma unroll
    for (int m = 0; m < T::kMmaM; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const QueryIndex at = tile.thread_query(m, r);
        slopes.of[m][r] =
            at.row < tile.seq.q.length ? slope_of(tile.args, tile.seq.batch, at.head) : 0.0f;
      }
    return slopes;
  }
  TEA_DEVICE ScoreScale score_scale() const {
    const AttentionArguments& args = tile.args;
    return {scalar_or_1(args.fp8.q_inv) * kv_scale(args, args.fp8.k_inv, tile.kv_head), args.scale};
  }
  // General kernels: scale, all modifications and the mask.
  TEA_DEVICE void modify(Scores& s, const ScoreScale& scale, const AlibiSlopes& slopes,
                         int block) const {
    const int64_t key = int64_t{block} * T::kBlockN;
#pragma unroll
    for (int m = 0; m < T::kMmaM; ++m) {
      ScoreModRow rows[2];
      VisibleRange visible[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const QueryIndex at = tile.thread_query(m, r);
        rows[r] = score_mod_row(tile.args, tile.seq, at.head, at.row, slopes.of[m][r]);
        visible[r] = visible_range(tile.seq, at.row, key, T::kBlockN);
      }
      modify_scores(s[m], tile.args, tile.seq, scale, rows, visible, key);
    }
  }

  // P: dropout, whose keep factor the epilogue applies except for FP8.
  TEA_DEVICE void drop(Scores& p, const DropoutState& dropout, int block) const {
    const int64_t key = int64_t{block} * T::kBlockN + tile.seq.origin_col;
#pragma unroll
    for (int m = 0; m < T::kMmaM; ++m)
      apply_dropout(p[m], dropout, tile.index.first + tile.row + 16 * m + tile.seq.origin_row, key,
                    C.fp8 ? tile.args.keep_factor : 1.0f);
  }
  // Rounds P to its FP8 type; fp16 holds each code exactly. Returns the maximum before the scale.
  TEA_DEVICE float cast_p(Scores& p, float scale) const {
    float amax = 0;
#pragma unroll
    for (int m = 0; m < T::kMmaM; ++m)
#pragma unroll
      for (int n = 0; n < T::kBlockN / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          amax = fmaxf(amax, p[m][n][i]);
          p[m][n][i] = cast_fp8(p[m][n][i] * scale, tile.args.q.dtype);
        }
    return amax;
  }
};

}  // namespace tea::portable
