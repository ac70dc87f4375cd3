// Backward kernels that serve every problem. Each CTA has a part of the result of its own, so that
// no sum depends on an order.
//
//   dkv    a CTA has 64 keys and a piece of dK and dV; it loops over heads and rows
//   dq     a CTA has 64 rows and a piece of dQ; it loops over keys
//   dbias  a CTA has 64 x 64 elements of dBias; it loops over the indices that the bias lacks
//
// Where the head dimensions need several pieces, the CTA of each piece computes all scores.
#include <algorithm>

#include "portable/backward/launch.h"
#include "portable/backward/piecewise.cuh"
#include "portable/grid.h"

namespace tea::portable {
namespace {

struct PiecewiseParams {
  BackwardArguments work;
  int64_t tiles_m;        // along the rows of the result
  int64_t tiles_n;        // dBias: along its columns
  int pieces;             // of the head dimensions
  int64_t first_cta = 0;  // of this launch
};

template <int kDtype>
TEA_DEVICE void compute_dkv(PiecewiseTile<kDtype>& t, int64_t b, int64_t kv_head, int first,
                            int begin) {
  using Tile = PiecewiseTile<kDtype>;
  const AttentionArguments& args = t.work.args;
  const SequencePair seq = sequence_pair_of(args, b);
  const int group = args.heads_q / args.heads_kv;
  const Columns rows = attending_rows(seq, first, min(int64_t{first} + kPieceRows, seq.kv.length));
  typename Tile::Output dk = {}, dv = {};
  for (int64_t h = kv_head * group; h < (kv_head + 1) * group; ++h) {
    const HeadModifiers head = head_modifiers(args, seq, h);
    for (int row = static_cast<int>(rows.begin) / kPieceRows * kPieceRows; row < rows.end;
         row += kPieceRows) {
      typename Tile::Scores x = {};
      t.compute_ds(x, seq, head, {row, first}, true, true);
      t.store_ds(x, seq, head);
      __syncthreads();
      t.load(t.a(), args.q, seq, true, h, row, begin, args.dim_qk);
      t.load(t.b(), args.dout, seq, true, h, row, begin, args.dim_v);
      t.wait_for_loads();
      const int column = t.warp_n() * 8 * Tile::kOutMmaN;
      gemm<kDtype, kPieceRows / 16, Major::kMn, Major::kMn>(dk, t.ds(), t.warp_row(), t.a(),
                                                            column);
      gemm<kDtype, kPieceRows / 16, Major::kMn, Major::kMn>(dv, t.p(), t.warp_row(), t.b(), column);
    }
  }
  const int64_t count = args.keys.form == TEA_RAGGED ? seq.kv.length : args.keys.max_seqlen;
  const auto head_element = [&](const StridedTensor& to) {
    return first_element(to, args.keys, seq.kv, b, kv_head);
  };
  t.store(dk,
          {args.dk, head_element(args.dk), begin, args.dim_qk, t.scales.dk,
           scalar_or_1(args.fp8.dk), args.fp8.dk_amax},
          first, count, seq.attended);
  t.store(dv,
          {args.dv, head_element(args.dv), begin, args.dim_v, t.scales.dv, scalar_or_1(args.fp8.dv),
           args.fp8.dv_amax},
          first, count, seq.attended);
  update_amax_by_warp(args.fp8.dp_amax, t.ds_amax);
}

template <int kDtype>
TEA_DEVICE void compute_dq(PiecewiseTile<kDtype>& t, int64_t b, int64_t h, int first, int begin) {
  using Tile = PiecewiseTile<kDtype>;
  const AttentionArguments& args = t.work.args;
  const SequencePair seq = sequence_pair_of(args, b);
  const HeadModifiers head = head_modifiers(args, seq, h);
  const int64_t kv_head = h / (args.heads_q / args.heads_kv);
  Columns rows = attending_rows(seq);
  rows = {max(rows.begin, int64_t{first}), min(rows.end, int64_t{first} + kPieceRows)};
  const Columns keys = rows.begin < rows.end ? attended_keys(seq, rows.begin, rows.end) : Columns{};
  typename Tile::Output dq = {};
  for (int key = static_cast<int>(keys.begin) / kPieceRows * kPieceRows; key < keys.end;
       key += kPieceRows) {
    typename Tile::Scores x = {};
    t.compute_ds(x, seq, head, {first, key}, false, true);
    t.store_ds(x, seq, head);
    __syncthreads();
    t.load(t.b(), args.k, seq, false, kv_head, key, begin, args.dim_qk);
    t.wait_for_loads();
    gemm<kDtype, kPieceRows / 16, Major::kK, Major::kMn>(dq, t.ds(), t.warp_row(), t.b(),
                                                         t.warp_n() * 8 * Tile::kOutMmaN);
  }
  const int64_t count = args.queries.form == TEA_RAGGED ? seq.q.length : args.queries.max_seqlen;
  const int64_t head_element = first_element(args.dq, args.queries, seq.q, b, h);
  t.store(dq,
          {args.dq, head_element, begin, args.dim_qk, t.scales.dq, scalar_or_1(args.fp8.dq),
           args.fp8.dq_amax},
          first, count, rows);
}

// A tile of dBias, of one (batch, head); lacks: whether the bias is broadcast over batch, head, row
// and column, of which the gradient is then the sum.
struct BiasGradientTile {
  int64_t batch, head, row, column;
  bool lacks[4];
};

// Sums up the rows or columns that the bias lacks in shared memory, then stores the tile.
template <int kDtype>
TEA_DEVICE void store_dbias(PiecewiseTile<kDtype>& t,
                            const typename PiecewiseTile<kDtype>::Scores& sum,
                            const BiasGradientTile& tile) {
  using Tile = PiecewiseTile<kDtype>;
  static_assert(sizeof t.s.a + sizeof t.s.b >= kPieceRows * (kPieceRows + 1) * sizeof(float));
  float(*const x)[kPieceRows + 1] = reinterpret_cast<float(*)[kPieceRows + 1]>(t.s.a);
  const int thread = static_cast<int>(threadIdx.x);
  __syncthreads();
#pragma unroll
  for (int n = 0; n < Tile::kMmaN; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      x[t.warp_row() + accumulator_row(i)]
       [t.warp_n() * 8 * Tile::kMmaN + accumulator_column(n, i)] = sum[0][n][i];
  __syncthreads();
  if (tile.lacks[2] && thread < kPieceRows)
    for (int i = 1; i < kPieceRows; ++i) x[0][thread] += x[i][thread];
  __syncthreads();
  if (tile.lacks[3] && thread < (tile.lacks[2] ? 1 : kPieceRows))
    for (int i = 1; i < kPieceRows; ++i) x[thread][0] += x[thread][i];
  __syncthreads();
  const AttentionArguments& args = t.work.args;
  const tea_bias_strides& stride = args.bias.gradient_stride;
  const int64_t rows = tile.lacks[2] ? 1 : args.queries.max_seqlen - tile.row;
  const int64_t columns = tile.lacks[3] ? 1 : args.keys.max_seqlen - tile.column;
  const int64_t at = tile.batch * stride.batch + tile.head * stride.head + tile.row * stride.row +
                     tile.column * stride.col;
  for (int n = thread; n < kPieceRows * kPieceRows; n += kPieceThreads) {
    const int row = n / kPieceRows, column = n % kPieceRows;
    if (row < rows && column < columns)
      store_float(args.bias.gradient, args.bias.dtype, at + row * stride.row + column * stride.col,
                  x[row][column]);
  }
}

template <int kDtype>
TEA_DEVICE void compute_dbias(PiecewiseTile<kDtype>& t, const BiasGradientTile& tile) {
  using Tile = PiecewiseTile<kDtype>;
  const AttentionArguments& args = t.work.args;
  const bool pre = args.bias.kind == TEA_BIAS_PRE_SCALE;
  typename Tile::Scores sum = {};
  const int64_t last_b = tile.lacks[0] ? args.batch : min(tile.batch + 1, args.batch);
  const int64_t last_h = tile.lacks[1] ? args.heads_q : tile.head + 1;
  for (int64_t b = tile.batch; b < last_b; ++b) {
    const SequencePair seq = sequence_pair_of(args, b);
    const int64_t last_row = tile.lacks[2] ? seq.q.length : min(tile.row + 1, seq.q.length);
    for (int64_t h = tile.head; h < last_h; ++h) {
      const HeadModifiers head = head_modifiers(args, seq, h);
      for (int64_t row = tile.row; row < last_row; row += kPieceRows) {
        Columns rows = attending_rows(seq);
        rows = {max(rows.begin, row), min(rows.end, row + kPieceRows)};
        if (rows.begin >= rows.end) continue;
        Columns keys = attended_keys(seq, rows.begin, rows.end);
        keys = {max(keys.begin / kPieceRows * kPieceRows, tile.column),
                tile.lacks[3] ? keys.end : min(keys.end, tile.column + 1)};
        for (int64_t key = keys.begin; key < keys.end; key += kPieceRows) {
          typename Tile::Scores x = {};
          t.compute_ds(x, seq, head, {static_cast<int>(row), static_cast<int>(key)}, false, pre);
#pragma unroll
          for (int n = 0; n < Tile::kMmaN; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) sum[0][n][i] += x[0][n][i] * (pre ? args.scale : 1.0f);
        }
      }
    }
  }
  store_dbias(t, sum, tile);
}

enum PiecewiseResult { kDkv, kDq, kDbias };

// Integers as template arguments: see kKernelConfig in forward/kernel.cuh.
template <int kDtype, int kResult>
__global__ void __launch_bounds__(kPieceThreads)
    piecewise_kernel(const __grid_constant__ PiecewiseParams p) {
  extern __shared__ __align__(128) uint8_t memory[];
  using Tile = PiecewiseTile<kDtype>;
  Tile t(p.work, *reinterpret_cast<typename Tile::SharedStorage*>(memory));
  const AttentionArguments& args = p.work.args;
  int64_t n = p.first_cta + blockIdx.x;
  const auto next = [&n](int64_t count) {
    const int64_t at = n % count;
    n /= count;
    return at;
  };
  if constexpr (kResult == kDbias) {
    const int lacks = args.bias.broadcast;
    const int64_t column = next(p.tiles_n) * kPieceRows, row = next(p.tiles_m) * kPieceRows;
    const int64_t head = next(lacks & TEA_BROADCAST_HEAD ? 1 : args.heads_q);
    compute_dbias(t, {n,
                      head,
                      row,
                      column,
                      {(lacks & TEA_BROADCAST_BATCH) != 0, (lacks & TEA_BROADCAST_HEAD) != 0,
                       (lacks & TEA_BROADCAST_ROW) != 0, (lacks & TEA_BROADCAST_COL) != 0}});
  } else {
    const int begin = static_cast<int>(next(p.pieces)) * Tile::kPieceDim;
    const int first = static_cast<int>(next(p.tiles_m)) * kPieceRows;
    const int64_t head = next(kResult == kDkv ? args.heads_kv : args.heads_q);
    if constexpr (kResult == kDkv)
      compute_dkv(t, n, head, first, begin);
    else
      compute_dq(t, n, head, first, begin);
  }
}

// repeats: how often the tiles are repeated, over heads and batch entries.
template <int kDtype, int kResult>
void launch_piecewise(PiecewiseParams p, int dim, int64_t repeats, cudaStream_t stream) {
  static OncePerDevice allowed;
  using Tile = PiecewiseTile<kDtype>;
  p.pieces = (dim + Tile::kPieceDim - 1) / Tile::kPieceDim;
  const int64_t ctas = p.tiles_m * p.tiles_n * p.pieces * repeats;
  if (ctas == 0) return;
  const Launch how{"backward, piecewise", {}, kPieceThreads, sizeof(typename Tile::SharedStorage)};
  allow_shared(how, piecewise_kernel<kDtype, kResult>, allowed);
  launch_grids(how, piecewise_kernel<kDtype, kResult>, p, p.work.args, ctas, stream);
}

template <int kResult>
void launch_by_type(const PiecewiseParams& p, int dim, int64_t repeats, cudaStream_t stream) {
  switch (operand_dtype(p.work.args)) {
    case TEA_FP16:
      return launch_piecewise<TEA_FP16, kResult>(p, dim, repeats, stream);
    case TEA_BF16:
      return launch_piecewise<TEA_BF16, kResult>(p, dim, repeats, stream);
    default:
      return launch_piecewise<TEA_FP32, kResult>(p, dim, repeats, stream);
  }
}

int64_t tiles(int64_t rows) { return (rows + kPieceRows - 1) / kPieceRows; }

}  // namespace

void launch_piecewise_dkv(const BackwardArguments& work, cudaStream_t stream) {
  const AttentionArguments& args = work.args;
  launch_by_type<kDkv>({work, tiles(args.keys.max_seqlen), 1, 0}, std::max(args.dim_qk, args.dim_v),
                       args.heads_kv * args.batch, stream);
}

void launch_piecewise_dq(const BackwardArguments& work, cudaStream_t stream) {
  const AttentionArguments& args = work.args;
  launch_by_type<kDq>({work, tiles(args.queries.max_seqlen), 1, 0}, args.dim_qk,
                      args.heads_q * args.batch, stream);
}

void launch_piecewise_dbias(const BackwardArguments& work, cudaStream_t stream) {
  const AttentionArguments& args = work.args;
  const int lacks = args.bias.broadcast;
  const int64_t batch = lacks & TEA_BROADCAST_BATCH ? 1 : work.bias_batch;
  const int64_t heads = lacks & TEA_BROADCAST_HEAD ? 1 : args.heads_q;
  const int64_t tiles_m = lacks & TEA_BROADCAST_ROW ? 1 : tiles(args.queries.max_seqlen);
  const int64_t tiles_n = lacks & TEA_BROADCAST_COL ? 1 : tiles(args.keys.max_seqlen);
  launch_by_type<kDbias>({work, tiles_m, tiles_n, 0}, 1, batch * heads, stream);
}

}  // namespace tea::portable
