// The loop over key blocks, last block first: S = Q K^T, online softmax, O += P V.
#pragma once
#include "math/formats.h"
#include "portable/forward/load.cuh"
#include "portable/forward/score_mod.cuh"
#include "portable/forward/softmax.cuh"

namespace tea::portable {

template <KernelConfig C>
struct Mainloop {
  using T = Traits<C>;
  using Scores = typename T::Scores;
  using Output = typename T::Output;

  const WorkTile<C>& tile;
  const SharedTiles<C>& shared;
  const TileLoader<C>& loader;

  // The fragments of 16 head dimensions. A warp with 16 rows has few products that could hide the
  // loads of the next fragments, and enough registers to load them one step ahead.
  struct QkFragments {
    FragmentA<T::kDtype> q[T::kMmaM];
    FragmentB<T::kDtype> k[T::kBlockN / 16];
  };
  static constexpr bool kPrefetchFragments = !C.general && T::kMmaM == 1;

  TEA_DEVICE void gemm_qk(Scores& s) const {
#pragma unroll
    for (int m = 0; m < T::kMmaM; ++m)
#pragma unroll
      for (int n = 0; n < T::kBlockN / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) s[m][n][i] = 0;
    const auto queries = offset_of<true>(shared.q, tile.row);
    const auto load = [&](int d) {
      QkFragments x;
#pragma unroll
      for (int m = 0; m < T::kMmaM; ++m) x.q[m] = load_a(queries.tile, 16 * m, d);
#pragma unroll
      for (int n = 0; n < T::kBlockN / 16; ++n) x.k[n] = load_b(shared.k, 16 * n, d);
      return x;
    };
    QkFragments next;
    if (kPrefetchFragments) next = load(0);
#pragma unroll(C.general ? 4 : T::kDim / 16)  // the general kernels compile faster
    for (int d = 0; d < T::kDim; d += 16) {
      const QkFragments now = kPrefetchFragments ? next : load(d);
      if (kPrefetchFragments && d + 16 < T::kDim) next = load(d + 16);
#pragma unroll
      for (int n = 0; n < T::kBlockN / 16; ++n)
#pragma unroll
        for (int m = 0; m < T::kMmaM; ++m) mma(s[m][2 * n], s[m][2 * n + 1], now.q[m], now.k[n]);
    }
  }
  TEA_DEVICE void gemm_pv(Output& o, const Scores& p) const {
#pragma unroll
    for (int c = 0; c < T::kBlockN / 16; ++c) {
      FragmentA<T::kDtype> a[T::kMmaM];
#pragma unroll
      for (int m = 0; m < T::kMmaM; ++m)
        a[m] = accumulator_as_a<T::kDtype>(p[m][2 * c], p[m][2 * c + 1]);
#pragma unroll
      for (int n = 0; n < T::kWarpDimV / 16; ++n) {
        const FragmentB<T::kDtype> b = load_b_transposed(shared.v, tile.column + 16 * n, 16 * c);
#pragma unroll
        for (int m = 0; m < T::kMmaM; ++m) mma(o[m][2 * n], o[m][2 * n + 1], a[m], b);
      }
    }
  }
  static TEA_DEVICE void rescale_o(float (&o)[T::kWarpDimV / 8][4], const float (&rescale)[2]) {
#pragma unroll
    for (int n = 0; n < T::kWarpDimV / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) o[n][i] *= rescale[row_slot(i)];
  }

  // FP8: the scale of P, reported if the largest P would saturate.
  TEA_DEVICE float checked_p_scale() const {
    const AttentionArguments& args = tile.args;
    const float scale = scalar_or_1(args.fp8.s);
    const float largest = args.q.dtype == TEA_E4M3 ? kE4M3.largest : kE5M2.largest;
    if (threadIdx.x == 0 && saturates(scale, args.keep_factor, largest))
      report_status(args, TEA_STATUS_SATURATED);
    return scale;
  }
  TEA_DEVICE float rescale_threshold() const {
    const RowStatistics& wanted = tile.args.statistics;
    return wanted.max || wanted.sum_exp ? 0.0f : OnlineSoftmax::kRescaleThreshold;
  }

  // Adds exp(score - row_max) V to o. FP8 rounds P relative to the row's final maximum, which a
  // first pass over the keys finds. Returns the maximum of P before it is rounded to FP8.
  TEA_DEVICE float run(Output& o, OnlineSoftmax (&softmax)[T::kMmaM], KeyBlocks blocks) const {
    const AttentionArguments& args = tile.args;
    const ScoreMod<C> score_mod{tile};
    const float scale_log2 = C.general ? kLog2E : args.scale * kLog2E;
    const float threshold = rescale_threshold();
    const MaskBounds bounds = score_mod.mask_bounds();
    const auto slopes = C.general ? score_mod.alibi_slopes() : typename ScoreMod<C>::AlibiSlopes{};
    DropoutState dropout = {};
    float p_scale = 1, p_amax = 0;
    if (C.general && args.rng) dropout = dropout_state(args, tile.seq.batch, tile.index.head);
    if constexpr (C.fp8) p_scale = checked_p_scale();
    for (int pass = C.fp8 ? 0 : 1; pass < 2; ++pass) {
      loader.load_k(blocks.end - 1);
      for (int block = blocks.end - 1; block >= blocks.begin; --block) {
        cp_async_wait<0>();
        __syncthreads();  // K has arrived, and every warp has read V
        if (pass == 1) loader.load_v(block);
        Scores s;
        gemm_qk(s);
        if constexpr (C.general)
          score_mod.modify(s, score_mod.score_scale(), slopes, block);
        else
          score_mod.apply_mask(s, bounds, block);
        cp_async_wait<0>();
        __syncthreads();  // V has arrived, and every warp has read K
        if (block > blocks.begin) loader.load_k(block - 1);
#pragma unroll
        for (int m = 0; m < T::kMmaM; ++m) {
          if (pass == 0) {
            softmax[m].update_max(s[m]);
            continue;
          }
          float rescale[2];
          softmax[m].template update<C.fp8>(s[m], scale_log2, threshold, rescale);
          // After the first block, where o is zero, maxima rarely rise. The branch must be uniform
          // across the warp.
          if (block != blocks.end - 1 && __any_sync(0xffffffff, rescale[0] != 1 || rescale[1] != 1))
            rescale_o(o[m], rescale);
        }
        if (pass == 0) continue;
        if (C.general && args.rng) score_mod.drop(s, dropout, block);
        if constexpr (C.fp8) p_amax = fmaxf(p_amax, score_mod.cast_p(s, p_scale));
        gemm_pv(o, s);
      }
    }
    return p_amax;
  }
};

}  // namespace tea::portable
