// Tiles of 64 rows by 64 keys whose scores are summed over pieces of the head dimensions, so that
// any dimension fits the shared memory of any GPU: two pieces of operands, then P and dS.
#pragma once
#include "portable/backward/config.h"
#include "portable/backward/load_rows.cuh"
#include "portable/backward/score_gradient.cuh"
#include "portable/backward/store_gradient.cuh"
#include "portable/device/mma.cuh"

namespace tea::portable {

inline constexpr int kPieceRows = 64, kPieceThreads = 256;  // kPieceRows: rows and keys of a tile

template <int kDtype>
struct PiecewiseTile {
  static constexpr int kPieceDim = kDtype == TEA_FP32 ? 64 : 128;  // 256 bytes of a row
  static constexpr int kWarpsM = 4, kWarpsN = 2;
  // A warp has 16 rows, 8 kMmaN columns of scores, and 8 kOutMmaN columns of a gradient.
  static constexpr int kMmaN = kPieceRows / kWarpsN / 8, kOutMmaN = kPieceDim / kWarpsN / 8;
  using Operand = SharedTile<kDtype, kPieceDim>;
  using ScoreOperand = SharedTile<kDtype, kPieceRows>;
  using Scores = float[1][kMmaN][4];
  using Output = float[1][kOutMmaN][4];

  struct SharedStorage {
    alignas(128) uint8_t a[kPieceRows * kPieceDim * kElementBytes<kDtype>];
    alignas(128) uint8_t b[kPieceRows * kPieceDim * kElementBytes<kDtype>];
    alignas(128) uint8_t p[kPieceRows * kPieceRows * kElementBytes<kDtype>];
    alignas(128) uint8_t ds[kPieceRows * kPieceRows * kElementBytes<kDtype>];
  };
  static_assert(sizeof(SharedStorage) <= 99 * 1024, "the limit of a CTA on sm_86 and sm_89");

  struct Position {
    int row, key;  // the tile's first
  };

  const BackwardArguments& work;
  SharedStorage& s;
  const BackwardScales scales;
  float ds_amax = 0;

  TEA_DEVICE PiecewiseTile(const BackwardArguments& arguments, SharedStorage& shared)
      : work(arguments), s(shared), scales(backward_scales(arguments.args)) {}

  static TEA_DEVICE int warp_row() { return warp() % kWarpsM * 16; }
  static TEA_DEVICE int warp_n() { return warp() / kWarpsM; }
  TEA_DEVICE Operand a() const { return {shared_address(s.a)}; }
  TEA_DEVICE Operand b() const { return {shared_address(s.b)}; }
  TEA_DEVICE ScoreOperand p() const { return {shared_address(s.p)}; }
  TEA_DEVICE ScoreOperand ds() const { return {shared_address(s.ds)}; }

  // Loads a piece of rows of Q or dO (is_query), or of K or V. Rows that attend to no key, and keys
  // that no row attends to, are zero.
  TEA_DEVICE void load(const Operand& to, const StridedTensor& rows, const SequencePair& seq,
                       bool is_query, int64_t head, int first, int begin, int dim) const {
    const AttentionArguments& args = work.args;
    const int64_t at = is_query ? first_element(rows, args.queries, seq.q, seq.batch, head)
                                : first_element(rows, args.keys, seq.kv, seq.batch, head);
    load_rows<true, kPieceRows, kPieceThreads>(
        to, rows, at, first, is_query ? attending_rows(seq) : seq.attended, begin, dim);
  }
  static TEA_DEVICE void wait_for_loads() {
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
  }

  // x += rows of `rows` times keys of `keys`, over `dim` head dimensions.
  TEA_DEVICE void gemm_scores(Scores& x, const StridedTensor& rows, const StridedTensor& keys,
                              const SequencePair& seq, int64_t head, Position at, int dim) const {
    const int64_t kv_head = head / (work.args.heads_q / work.args.heads_kv);
    for (int begin = 0; begin < dim; begin += kPieceDim) {
      __syncthreads();
      load(a(), rows, seq, true, head, at.row, begin, dim);
      load(b(), keys, seq, false, kv_head, at.key, begin, dim);
      wait_for_loads();
      gemm<kDtype, kPieceDim / 16, Major::kK, Major::kK>(x, a(), warp_row(), b(),
                                                         warp_n() * 8 * kMmaN);
    }
  }

  TEA_DEVICE void load_row_values(const float* from, int64_t entry, const SequencePair& seq,
                                  int row, float (&to)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int i = row + accumulator_row(2 * r);
      to[r] = i < seq.q.length ? from[entry + i] : 0.0f;
    }
  }

  template <class Value>
  static TEA_DEVICE void store_operand(const ScoreOperand& to, const Scores& x, Value&& value) {
#pragma unroll
    for (int n = 0; n < kMmaN; ++n)
#pragma unroll
      for (int r = 0; r < 2; ++r)
        store_pair(to, warp_row() + accumulator_row(2 * r),
                   warp_n() * 8 * kMmaN + accumulator_column(n, 0), value(x[0][n][2 * r]),
                   value(x[0][n][2 * r + 1]));
  }

  // x: the gradients of the tile's scores, before the soft cap if applies_cap, otherwise after it.
  // Stores P in shared memory if stores_p.
  TEA_DEVICE void compute_ds(Scores& x, const SequencePair& seq, const HeadModifiers& head,
                             Position at, bool stores_p, bool applies_cap) {
    const AttentionArguments& args = work.args;
    const int64_t entry = first_entry(work, seq, head.head);
    const int row = at.row + warp_row();
    const ScoreGradient<kMmaN> gradient{args, seq, head, row, at.key + warp_n() * 8 * kMmaN};
    float cap_slope[kMmaN][4], lse2[2], delta[2];
    gemm_scores(x, args.q, args.k, seq, head.head, at, args.dim_qk);
    load_row_values(work.buffers.lse2, entry, seq, row, lse2);
    gradient.compute_p(x[0], cap_slope, scales.scores, lse2);
    if (stores_p)
      store_operand(p(), x, [&](float value) { return gradient.p_operand(value, scales.p_cast); });
    if (applies_cap)
#pragma unroll
      for (int n = 0; n < kMmaN; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) x[0][n][i] *= fmaxf(cap_slope[n][i], 0.0f);
    Scores dp = {};
    gemm_scores(dp, args.dout, args.v, seq, head.head, at, args.dim_v);
    load_row_values(work.buffers.delta, entry, seq, row, delta);
    gradient.compute_ds(x[0], dp[0], scales.dp, delta);
  }
  TEA_DEVICE void store_ds(const Scores& x, const SequencePair& seq, const HeadModifiers& head) {
    const ScoreGradient<kMmaN> gradient{work.args, seq, head, 0, 0};
    store_operand(ds(), x,
                  [&](float value) { return gradient.ds_operand(value, scales, &ds_amax); });
  }

  // Stores a gradient. The memory of both operands, which are not needed any more, holds it as
  // fp32.
  TEA_DEVICE void store(const Output& x, const GradientOutput& to, int first, int64_t count,
                        const Columns& valid) {
    static_assert(sizeof s.a + sizeof s.b >= kPieceRows * kPieceDim * sizeof(float));
    float(*const sums)[kPieceDim] = reinterpret_cast<float(*)[kPieceDim]>(s.a);
    __syncthreads();
#pragma unroll
    for (int n = 0; n < kOutMmaN; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        sums[warp_row() + accumulator_row(i)][warp_n() * 8 * kOutMmaN + accumulator_column(n, i)] =
            x[0][n][i];
    __syncthreads();
    store_gradient<kPieceRows, kPieceDim, kPieceThreads>(sums, to, to.rows.dtype, first, count,
                                                         valid);
  }
};

}  // namespace tea::portable
