// dQ without atomics: a warp keeps its query rows and their dQ in registers, and the CTA loops over
// the key blocks that they attend to.
//
//   load next K, V | S = Q K^T | dP = dO V^T | dS = exp(S - LSE) (dP - delta) | dQ += dS K
//
// dS is converted from accumulators to an operand in registers, so that warps wait for the copies
// of K and V only.
#pragma once
#include "portable/backward/config.h"
#include "portable/backward/load_rows.cuh"
#include "portable/backward/score_gradient.cuh"
#include "portable/device/mma.cuh"

namespace tea::portable {

template <DqConfig C>
struct DqTraits {
  static constexpr int kDtype = C.dtype, kDim = C.tile.dim;
  static constexpr int kBlockM = C.tile.block_m, kBlockN = C.tile.block_n, kMmaM = C.tile.mma_m;
  static constexpr int kWarpRows = 16 * kMmaM, kThreads = 32 * kBlockM / kWarpRows;
  static constexpr int kMmaN = kBlockN / 8;
  static constexpr bool kGeneral = C.tile.general;
  using Operand = SharedTile<kDtype, kDim>;
  using Scores = float[kMmaM][kMmaN][4];

  struct SharedStorage {
    alignas(128) uint8_t q[kBlockM * kDim * 2];
    alignas(128) uint8_t dout[kBlockM * kDim * 2];
    alignas(128) uint8_t k[2][kBlockN * kDim * 2];
    alignas(128) uint8_t v[2][kBlockN * kDim * 2];
  };
  static_assert(sizeof(SharedStorage) == C.tile.shared_bytes());
  static_assert(sizeof(SharedStorage) <= 227 * 1024, "the limit of a CTA on sm_90");
};

template <DqConfig C>
struct DqMainloop {
  using T = DqTraits<C>;
  using Operand = typename T::Operand;
  using Scores = typename T::Scores;
  static constexpr int kMmaM = T::kMmaM, kMmaN = T::kMmaN, kBlockM = T::kBlockM,
                       kBlockN = T::kBlockN;

  const BackwardParams& p;
  const AttentionArguments& args;
  typename T::SharedStorage& s;
  const SequencePair& seq;
  const int head, kv_head, first;
  const BackwardScales scales;
  Columns rows;  // of the tile that attend to any key
  float lse2[kMmaM][2], delta[kMmaM][2];
  float dq[kMmaM][T::kDim / 8][4];

  TEA_DEVICE DqMainloop(const BackwardParams& params, typename T::SharedStorage& shared,
                        const SequencePair& pair, int query_head, int first_row)
      : p(params),
        args(params.work.args),
        s(shared),
        seq(pair),
        head(query_head),
        kv_head(query_head / (args.heads_q / args.heads_kv)),
        first(first_row),
        scales(backward_scales<!T::kGeneral>(args)),
        rows(attending_rows(pair)),
        dq{} {
    rows = {max(rows.begin, int64_t{first}), min(rows.end, int64_t{first} + kBlockM)};
    const int64_t entry = first_entry(p.work, seq, head);
#pragma unroll
    for (int m = 0; m < kMmaM; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int i = warp_row(m) + accumulator_row(2 * r);
        const bool any = i >= rows.begin && i < rows.end;
        lse2[m][r] = any ? p.work.buffers.lse2[entry + i] : 0.0f;
        delta[m][r] = any ? p.work.buffers.delta[entry + i] : 0.0f;
      }
  }
  // The first of the warp's rows, or of 16 of them.
  TEA_DEVICE int warp_row(int m = 0) const { return first + T::kWarpRows * warp() + 16 * m; }

  TEA_DEVICE void load_queries(uint8_t* to, const StridedTensor& from, int dim) const {
    load_rows<T::kGeneral, kBlockM, T::kThreads>(
        Operand{shared_address(to)}, from,
        first_element(from, args.queries, seq.q, seq.batch, head), first, rows, 0, dim);
  }
  TEA_DEVICE void load_keys(uint8_t* to, const StridedTensor& from, int dim, int key) const {
    load_rows<T::kGeneral, kBlockN, T::kThreads>(
        Operand{shared_address(to)}, from,
        first_element(from, args.keys, seq.kv, seq.batch, kv_head), key, seq.attended, 0, dim);
  }
  TEA_DEVICE void load_key_block(int key, int stage) const {
    load_keys(s.k[stage], args.k, args.dim_qk, key);
    load_keys(s.v[stage], args.v, args.dim_v, key);
    cp_async_commit();
  }

  // Whether some of the warp's rows attend to some key of the block, or all rows to all keys.
  TEA_DEVICE bool is_any_visible(int key) const {
    const int row = warp_row();
    return key <= row + T::kWarpRows - 1 + seq.band.hi && key + kBlockN - 1 >= row + seq.band.lo;
  }
  TEA_DEVICE bool is_unmasked(int key) const {
    const int row = warp_row(), last = row + T::kWarpRows - 1;
    return row >= rows.begin && last < rows.end && key + kBlockN <= seq.kv.length &&
           key + kBlockN - 1 <= row + seq.band.hi && key >= last + seq.band.lo;
  }

  TEA_DEVICE void gemm_scores(Scores& x, const uint8_t* queries, const uint8_t* keys) const {
    gemm<T::kDtype, T::kDim / 16, Major::kK, Major::kK>(x, Operand{shared_address(queries)},
                                                        T::kWarpRows * warp(),
                                                        Operand{shared_address(keys)}, 0);
  }
  TEA_DEVICE void apply_mask(float (&x)[kMmaN][4], int row, int key) const {
    VisibleRange visible[2];
#pragma unroll
    for (int r = 0; r < 2; ++r)
      visible[r] = visible_range(seq, row + accumulator_row(2 * r), key, kBlockN);
#pragma unroll
    for (int n = 0; n < kMmaN; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (!visible[row_slot(i)].contains(accumulator_column(n, i))) x[n][i] = 0;
  }
  // x: dS, without score modifications.
  TEA_DEVICE void compute_plain(Scores& x, int key, int stage) const {
    Scores dp = {};
    gemm_scores(x, s.q, s.k[stage]);
    gemm_scores(dp, s.dout, s.v[stage]);
    const bool unmasked = is_unmasked(key);
#pragma unroll
    for (int m = 0; m < kMmaM; ++m) {
#pragma unroll
      for (int n = 0; n < kMmaN; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          x[m][n][i] = probability(x[m][n][i], p.scale_log2, lse2[m][row_slot(i)]) *
                       (dp[m][n][i] - delta[m][row_slot(i)]);
      if (!unmasked) apply_mask(x[m], warp_row(m), key);
    }
  }
  // x: dS, with every option.
  TEA_DEVICE void compute_general(Scores& x, int key, int stage,
                                  const HeadModifiers& modifiers) const {
    float ds_amax = 0;  // not used: the main kernel records it
    float cap_slope[kMmaM][kMmaN][4];
    const auto tile = [&](int m) {
      return ScoreGradient<kMmaN>{args, seq, modifiers, warp_row(m), key};
    };
    gemm_scores(x, s.q, s.k[stage]);
#pragma unroll
    for (int m = 0; m < kMmaM; ++m) {
      tile(m).compute_p(x[m], cap_slope[m], scales.scores, lse2[m]);
#pragma unroll
      for (int n = 0; n < kMmaN; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) x[m][n][i] *= fmaxf(cap_slope[m][n][i], 0.0f);
    }
    Scores dp = {};
    gemm_scores(dp, s.dout, s.v[stage]);
#pragma unroll
    for (int m = 0; m < kMmaM; ++m) {
      tile(m).compute_ds(x[m], dp[m], scales.dp, delta[m]);
#pragma unroll
      for (int n = 0; n < kMmaN; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) x[m][n][i] = tile(m).ds_operand(x[m][n][i], scales, &ds_amax);
    }
  }
  // dQ += dS K.
  TEA_DEVICE void gemm_dq(const Scores& ds, int stage) {
    const Operand keys{shared_address(s.k[stage])};
    const int l = opaque_thread(lane());
#pragma unroll
    for (int step = 0; step < kBlockN / 16; ++step) {
      FragmentA<T::kDtype> a[kMmaM];
#pragma unroll
      for (int m = 0; m < kMmaM; ++m)
        a[m] = accumulator_as_a<T::kDtype>(ds[m][2 * step], ds[m][2 * step + 1]);
#pragma unroll
      for (int n = 0; n < T::kDim / 16; ++n) {
        const FragmentB<T::kDtype> b = load_b_transposed(keys, 16 * n, 16 * step, l);
#pragma unroll
        for (int m = 0; m < kMmaM; ++m) mma<T::kDtype>(dq[m][2 * n], dq[m][2 * n + 1], a[m], b);
      }
    }
  }

  TEA_DEVICE void run() {
    if (rows.begin >= rows.end) return;
    const Columns keys = attended_keys(seq, rows.begin, rows.end);
    const int begin = static_cast<int>(keys.begin) / kBlockN * kBlockN;
    const int end = static_cast<int>(keys.end);
    if (begin >= end) return;
    const HeadModifiers modifiers = T::kGeneral ? head_modifiers(args, seq, head) : HeadModifiers{};
    load_queries(s.q, args.q, args.dim_qk);
    load_queries(s.dout, args.dout, args.dim_v);
    load_key_block(begin, 0);
    int stage = 0;
    for (int key = begin; key < end; key += kBlockN, stage ^= 1) {
      cp_async_wait<0>();
      __syncthreads();  // K and V have arrived, and every warp has read the previous ones
      if (key + kBlockN < end) load_key_block(key + kBlockN, stage ^ 1);
      if (!is_any_visible(key)) continue;
      Scores x = {};
      if constexpr (T::kGeneral)
        compute_general(x, key, stage, modifiers);
      else
        compute_plain(x, key, stage);
      gemm_dq(x, stage);
    }
  }
};

}  // namespace tea::portable
