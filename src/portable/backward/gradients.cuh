// S, P, dP and dS of one query tile and one key block in the main backward kernel. P and dS are
// stored in shared memory as operands of the products for dV, dK and dQ.
#pragma once
#include "portable/backward/load.cuh"
#include "portable/backward/score_gradient.cuh"

namespace tea::portable {

template <BackwardConfig C>
struct TileGradients {
  using T = BackwardTraits<C>;
  using Grid = typename T::ScoreGrid;
  using Scores = typename Grid::Accumulator;
  using Iterator = QueryTileIterator<T::kBlockM>;

  // The position of a warp's accumulators of scores in the tile.
  struct Position {
    int row, column;
    int lane;
    TEA_DEVICE int row_at(int m, int half) const { return row + 16 * m + 8 * half + lane / 4; }
    TEA_DEVICE int column_at(int n) const { return column + 8 * n + lane % 4 * 2; }
  };

  const BackwardWorkTile<C>& tile;

  // Calls change(element) for the elements that the mask or the ends of the sequences hide.
  template <class Change>
  TEA_DEVICE void for_each_masked(const Position& at, int first, Scores& x, Change&& change) const {
    const int left = tile.key + at.column_at(0);
#pragma unroll
    for (int m = 0; m < Grid::kMmaM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = first + at.row_at(m, half);
        const bool any = row >= tile.begin && row < tile.end;
        const int begin = any ? row + tile.lo - left : T::kBlockN;
        const int end = min(row + tile.hi + 1, tile.keys) - left;
#pragma unroll
        for (int n = 0; n < Grid::kMmaN; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e)
            if (8 * n + e < begin || 8 * n + e >= end) change(x[m][n][2 * half + e]);
      }
  }
  // Whether all rows of the query tile attend to all keys of the block.
  TEA_DEVICE bool is_unmasked(int first) const {
    return first >= tile.begin && first + T::kBlockM <= tile.end &&
           tile.key + T::kBlockN <= tile.keys && tile.key + T::kBlockN - 1 - first <= tile.hi &&
           tile.key - (first + T::kBlockM - 1) >= tile.lo;
  }

  // Stores the warp's 16 rows m.
  template <class Value>
  static TEA_DEVICE void store_rows(const typename T::ScoreOperand& to, const Position& at,
                                    const Scores& x, int m, Value&& value) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int n = 0; n < Grid::kMmaN; ++n)
        store_pair(to, at.row_at(m, half), at.column_at(n), value(x[m][n][2 * half]),
                   value(x[m][n][2 * half + 1]));
  }
  static TEA_DEVICE void store(const typename T::ScoreOperand& to, const Position& at,
                               const Scores& x) {
#pragma unroll
    for (int m = 0; m < Grid::kMmaM; ++m) store_rows(to, at, x, m, [](float same) { return same; });
  }
  static TEA_DEVICE void load_row_values(const float* from, const Position& at, int m,
                                         float (&to)[2]) {
    to[0] = from[at.row_at(m, 0)], to[1] = from[at.row_at(m, 1)];
  }

  // x += rows of `a` times keys of `b`.
  static TEA_DEVICE void gemm_scores(Scores& x, const typename T::Operand& a,
                                     const typename T::Operand& b, const Position& at) {
    gemm<T::kDtype, T::kDim / 16, Major::kK, Major::kK>(x, a, at.row, b, at.column);
  }

  // Without score modifications.
  TEA_DEVICE void compute_plain(const Iterator& query, int stage, const Position& at) const {
    const typename T::Operand q{shared_address(tile.s.q[stage])},
        dout{shared_address(tile.s.dout[stage])};
    const bool unmasked = is_unmasked(query.first);
    Scores x = {}, dp = {};
    gemm_scores(x, q, {shared_address(tile.s.k)}, at);
    if (!unmasked)
      for_each_masked(at, query.first, x, [](float& masked) { masked = kMinusInfinity; });
#pragma unroll
    for (int m = 0; m < Grid::kMmaM; ++m) {
      float lse2[2];
      load_row_values(tile.s.lse2[stage], at, m, lse2);
#pragma unroll
      for (int n = 0; n < Grid::kMmaN; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          x[m][n][i] = probability(x[m][n][i], tile.p.scale_log2, lse2[row_slot(i)]);
    }
    store({shared_address(tile.s.p)}, at, x);
    gemm_scores(dp, dout, {shared_address(tile.s.v)}, at);
#pragma unroll
    for (int m = 0; m < Grid::kMmaM; ++m) {
      float delta[2];
      load_row_values(tile.s.delta[stage], at, m, delta);
#pragma unroll
      for (int n = 0; n < Grid::kMmaN; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) x[m][n][i] *= dp[m][n][i] - delta[row_slot(i)];
    }
    if (!unmasked) for_each_masked(at, query.first, x, [](float& masked) { masked = 0; });
    store({shared_address(tile.s.ds)}, at, x);
  }

  // With every option.
  TEA_DEVICE void compute_general(const Iterator& query, int stage, const Position& at,
                                  float* ds_amax) const {
    const AttentionArguments& args = tile.p.work.args;
    const BackwardScales scales = backward_scales(args);
    const HeadModifiers head = head_modifiers(args, tile.seq, query.head);
    const typename T::Operand q{shared_address(tile.s.q[stage])},
        dout{shared_address(tile.s.dout[stage])};
    const auto rows = [&](int m) {
      return ScoreGradient<Grid::kMmaN>{args, tile.seq, head, query.first + at.row + 16 * m,
                                        tile.key + at.column};
    };
    Scores x = {}, dp = {};
    gemm_scores(x, q, {shared_address(tile.s.k)}, at);
#pragma unroll
    for (int m = 0; m < Grid::kMmaM; ++m) {
      float lse2[2], cap_slope[Grid::kMmaN][4];
      load_row_values(tile.s.lse2[stage], at, m, lse2);
      rows(m).compute_p(x[m], cap_slope, scales.scores, lse2);
      store_rows({shared_address(tile.s.p)}, at, x, m,
                 [&](float p) { return rows(m).p_operand(p, scales.p_cast); });
#pragma unroll
      for (int n = 0; n < Grid::kMmaN; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) x[m][n][i] *= fmaxf(cap_slope[n][i], 0.0f);
    }
    gemm_scores(dp, dout, {shared_address(tile.s.v)}, at);
#pragma unroll
    for (int m = 0; m < Grid::kMmaM; ++m) {
      float delta[2];
      load_row_values(tile.s.delta[stage], at, m, delta);
      rows(m).compute_ds(x[m], dp[m], scales.dp, delta);
      store_rows({shared_address(tile.s.ds)}, at, x, m,
                 [&](float ds) { return rows(m).ds_operand(ds, scales, ds_amax); });
    }
  }
};

}  // namespace tea::portable
