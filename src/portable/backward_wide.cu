// Backward passes for everything: tiles of 64 rows by 64 keys whose scores are summed over pieces
// of the head dimensions, so that any dimension fits the shared memory of any GPU, and whose
// results have one block of threads each, so that no sum depends on an order.
//
//   wide_keys     a block has 64 keys, and a piece of dK and dV; it loops over heads and rows
//   wide_queries  a block has 64 rows, and a piece of dQ; it loops over keys
//   wide_bias     a block has 64 x 64 elements of dBias; it loops over what the bias lacks
//
// A block whose dimensions need several pieces computes all scores for each of them.
//
// Shared memory: two tiles for a piece of the operands, then P and dS.
#include <algorithm>

#include "gpu/launch.h"
#include "portable/backward_passes.h"
#include "portable/device/gradient.cuh"

namespace tea::portable {
namespace {

constexpr int kSide = 64, kThreads = 256, kWarpsDown = 4, kWarpsAcross = 2;
constexpr int kTiles = kSide / kWarpsAcross / 8;  // of a warp's scores: 16 rows, 8 kTiles columns

struct Parameters {
  BackwardArguments work;
  int64_t tiles;   // along the output's rows, or its columns
  int64_t across;  // dBias: tiles along its columns
  int pieces;      // of the head dimensions
};

template <int kDtype>
struct Wide {
  static constexpr int kPiece = kDtype == TEA_FP32 ? 64 : 128;  // 256 bytes of a row
  static constexpr int kOutTiles = kPiece / kWarpsAcross / 8;
  using Operand = Tile<kDtype, kPiece>;
  using Scores = float[1][kTiles][4];
  using Output = float[1][kOutTiles][4];

  struct Smem {
    alignas(128) uint8_t left[kSide * kPiece * kElementBytes<kDtype>];
    alignas(128) uint8_t right[kSide * kPiece * kElementBytes<kDtype>];
    alignas(128) uint8_t p[kSide * kSide * kElementBytes<kDtype>];
    alignas(128) uint8_t ds[kSide * kSide * kElementBytes<kDtype>];
  };
  static_assert(sizeof(Smem) <= 99 * 1024, "the smallest limit of any GPU from sm_80 on");

  const BackwardArguments& work;
  Smem& s;
  const Factors f;
  float largest_ds = 0;

  TEA_DEVICE Wide(const BackwardArguments& from, Smem& smem)
      : work(from), s(smem), f(factors_of(from.args)) {}

  static TEA_DEVICE int down() { return warp() % kWarpsDown * 16; }
  static TEA_DEVICE int across() { return warp() / kWarpsDown; }
  TEA_DEVICE Operand left() const { return {shared_address(s.left)}; }
  TEA_DEVICE Operand right() const { return {shared_address(s.right)}; }
  TEA_DEVICE Tile<kDtype, kSide> p() const { return {shared_address(s.p)}; }
  TEA_DEVICE Tile<kDtype, kSide> ds() const { return {shared_address(s.ds)}; }

  // Rows of a tensor on the side of the queries, or of the keys, as far as they matter.
  TEA_DEVICE void load(const Operand& to, const StridedTensor& rows, const SequencePair& seq,
                       bool queries, int64_t head, int first, int begin, int dim) const {
    const AttentionArguments& args = work.args;
    const int64_t at = queries ? first_element(rows, args.queries, seq.q, seq.batch, head)
                               : first_element(rows, args.keys, seq.kv, seq.batch, head);
    load_rows<true, kSide, kThreads>(to, rows, at, first, queries ? seeing_rows(seq) : seq.attended,
                                     begin, dim);
  }
  static TEA_DEVICE void arrive() {
    commit_copies();
    wait_copies<0>();
    __syncthreads();
  }

  struct At {
    int row, key;  // the tile's first
  };
  // x = rows of `rows` times keys of `keys`, over `dim`.
  TEA_DEVICE void product(Scores& x, const StridedTensor& rows, const StridedTensor& keys,
                          const SequencePair& seq, int64_t head, At at, int dim) const {
    const int64_t kv_head = head / (work.args.heads_q / work.args.heads_kv);
    for (int begin = 0; begin < dim; begin += kPiece) {
      __syncthreads();
      load(left(), rows, seq, true, head, at.row, begin, dim);
      load(right(), keys, seq, false, kv_head, at.key, begin, dim);
      arrive();
      multiply_tiles<kDtype, kPiece / 16, Summed::kAlongRows, Summed::kAlongRows>(
          x, left(), down(), right(), across() * 8 * kTiles);
    }
  }

  TEA_DEVICE void row_sums(const float* from, int64_t entry, const SequencePair& seq, int row,
                           float (&to)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int i = row + row_of(2 * r);
      to[r] = i < seq.q.length ? from[entry + i] : 0.0f;
    }
  }

  template <class Value>
  static TEA_DEVICE void put(const Tile<kDtype, kSide>& tile, const Scores& x, Value&& value) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int r = 0; r < 2; ++r)
        store_two(tile, down() + row_of(2 * r), across() * 8 * kTiles + column_of(n, 0),
                  value(x[0][n][2 * r]), value(x[0][n][2 * r + 1]));
  }

  // x: the gradient of each score of the tile at hand, before (dBias after the cap) or after the
  // slope of the soft cap. P goes to its tile where wanted.
  TEA_DEVICE void gradients(Scores& x, const SequencePair& seq, const Head& head, At at,
                            bool wants_p, bool wants_bend) {
    const AttentionArguments& args = work.args;
    const int64_t entry = first_entry(work, seq, head.number);
    const int row = at.row + down();
    const Strip<kTiles> strip{args, seq, head, row, at.key + across() * 8 * kTiles};
    float bend[kTiles][4], lse2[2], delta[2];
    product(x, args.q, args.k, seq, head.number, at, args.dim_qk);
    row_sums(work.sums.lse2, entry, seq, row, lse2);
    strip.weigh(x[0], bend, f.scores, lse2);
    if (wants_p) put(p(), x, [&](float value) { return strip.operand(value, f.p); });
    if (wants_bend)
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) x[0][n][i] *= fmaxf(bend[n][i], 0.0f);
    Scores dp = {};
    product(dp, args.dout, args.v, seq, head.number, at, args.dim_v);
    row_sums(work.sums.delta, entry, seq, row, delta);
    strip.slope(x[0], dp[0], f.dprob, delta);
  }
  TEA_DEVICE void put_gradients(const Scores& x, const SequencePair& seq, const Head& head) {
    const Strip<kTiles> strip{work.args, seq, head, 0, 0};
    put(ds(), x, [&](float value) { return strip.slope_operand(value, f, &largest_ds); });
  }

  // The sums as [kSide][kPiece] in the memory of the operands, which nobody needs any more.
  TEA_DEVICE void store(const Output& x, const Result& to, int first, int64_t count,
                        const Columns& valid) {
    static_assert(sizeof s.left + sizeof s.right >= kSide * kPiece * sizeof(float));
    float(*const sums)[kPiece] = reinterpret_cast<float(*)[kPiece]>(s.left);
    __syncthreads();
#pragma unroll
    for (int n = 0; n < kOutTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        sums[down() + row_of(i)][across() * 8 * kOutTiles + column_of(n, i)] = x[0][n][i];
    __syncthreads();
    store_sums<kSide, kPiece, kThreads>(sums, to, first, count, valid);
  }

  TEA_DEVICE void keys(int64_t b, int64_t kv_head, int first, int begin) {
    const AttentionArguments& args = work.args;
    const SequencePair seq = sequence_pair_of(args, b);
    const int group = args.heads_q / args.heads_kv;
    const Columns rows = seeing_rows(seq, first, min(int64_t{first} + kSide, seq.kv.length));
    Output dk = {}, dv = {};
    for (int64_t h = kv_head * group; h < (kv_head + 1) * group; ++h) {
      const Head head = head_of(args, seq, h);
      for (int row = static_cast<int>(rows.begin) / kSide * kSide; row < rows.end; row += kSide) {
        Scores x = {};
        gradients(x, seq, head, {row, first}, true, true);
        put_gradients(x, seq, head);
        __syncthreads();
        load(left(), args.q, seq, true, h, row, begin, args.dim_qk);
        load(right(), args.dout, seq, true, h, row, begin, args.dim_v);
        arrive();
        const int column = across() * 8 * kOutTiles;
        multiply_tiles<kDtype, kSide / 16, Summed::kAcrossRows, Summed::kAcrossRows>(
            dk, ds(), down(), left(), column);
        multiply_tiles<kDtype, kSide / 16, Summed::kAcrossRows, Summed::kAcrossRows>(
            dv, p(), down(), right(), column);
      }
    }
    const int64_t all = args.keys.form == TEA_RAGGED ? seq.kv.length : args.keys.max_seqlen;
    const auto place = [&](const StridedTensor& to) {
      return first_element(to, args.keys, seq.kv, b, kv_head);
    };
    store(
        dk,
        {args.dk, place(args.dk), begin, args.dim_qk, f.dk, scalar(args.fp8.dk), args.fp8.dk_amax},
        first, all, seq.attended);
    store(dv,
          {args.dv, place(args.dv), begin, args.dim_v, f.dv, scalar(args.fp8.dv), args.fp8.dv_amax},
          first, all, seq.attended);
    raise_by_warp(args.fp8.dp_amax, largest_ds);
  }

  TEA_DEVICE void queries(int64_t b, int64_t h, int first, int begin) {
    const AttentionArguments& args = work.args;
    const SequencePair seq = sequence_pair_of(args, b);
    const Head head = head_of(args, seq, h);
    const int64_t kv_head = h / (args.heads_q / args.heads_kv);
    Columns rows = seeing_rows(seq);
    rows = {max(rows.begin, int64_t{first}), min(rows.end, int64_t{first} + kSide)};
    const Columns keys = rows.begin < rows.end ? seen_keys(seq, rows.begin, rows.end) : Columns{};
    Output dq = {};
    for (int key = static_cast<int>(keys.begin) / kSide * kSide; key < keys.end; key += kSide) {
      Scores x = {};
      gradients(x, seq, head, {first, key}, false, true);
      put_gradients(x, seq, head);
      __syncthreads();
      load(right(), args.k, seq, false, kv_head, key, begin, args.dim_qk);
      arrive();
      multiply_tiles<kDtype, kSide / 16, Summed::kAlongRows, Summed::kAcrossRows>(
          dq, ds(), down(), right(), across() * 8 * kOutTiles);
    }
    const int64_t all = args.queries.form == TEA_RAGGED ? seq.q.length : args.queries.max_seqlen;
    const int64_t place = first_element(args.dq, args.queries, seq.q, b, h);
    store(dq, {args.dq, place, begin, args.dim_qk, f.dq, scalar(args.fp8.dq), args.fp8.dq_amax},
          first, all, rows);
  }

  // The part of dBias at `tile`, of one (batch, head), from all that shares it.
  struct BiasTile {
    int64_t batch, head, row, column;
    bool lacks[4];
  };
  TEA_DEVICE void bias(const BiasTile& tile) {
    const AttentionArguments& args = work.args;
    const bool pre = args.bias.kind == TEA_BIAS_PRE_SCALE;
    Scores sum = {};
    const int64_t last_b = tile.lacks[0] ? args.batch : min(tile.batch + 1, args.batch);
    const int64_t last_h = tile.lacks[1] ? args.heads_q : tile.head + 1;
    for (int64_t b = tile.batch; b < last_b; ++b) {
      const SequencePair seq = sequence_pair_of(args, b);
      const int64_t last_row = tile.lacks[2] ? seq.q.length : min(tile.row + 1, seq.q.length);
      for (int64_t h = tile.head; h < last_h; ++h) {
        const Head head = head_of(args, seq, h);
        for (int64_t row = tile.row; row < last_row; row += kSide) {
          Columns rows = seeing_rows(seq);
          rows = {max(rows.begin, row), min(rows.end, row + kSide)};
          if (rows.begin >= rows.end) continue;
          Columns keys = seen_keys(seq, rows.begin, rows.end);
          keys = {max(keys.begin / kSide * kSide, tile.column),
                  tile.lacks[3] ? keys.end : min(keys.end, tile.column + 1)};
          for (int64_t key = keys.begin; key < keys.end; key += kSide) {
            Scores x = {};
            gradients(x, seq, head, {static_cast<int>(row), static_cast<int>(key)}, false, pre);
#pragma unroll
            for (int n = 0; n < kTiles; ++n)
#pragma unroll
              for (int i = 0; i < 4; ++i) sum[0][n][i] += x[0][n][i] * (pre ? args.scale : 1.0f);
          }
        }
      }
    }
    store_bias(sum, tile);
  }

  // Sums up the rows or columns that the bias lacks, in shared memory, then writes.
  TEA_DEVICE void store_bias(const Scores& sum, const BiasTile& tile) {
    static_assert(sizeof s.left + sizeof s.right >= kSide * (kSide + 1) * sizeof(float));
    float(*const x)[kSide + 1] = reinterpret_cast<float(*)[kSide + 1]>(s.left);
    const int thread = static_cast<int>(threadIdx.x);
    __syncthreads();
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        x[down() + row_of(i)][across() * 8 * kTiles + column_of(n, i)] = sum[0][n][i];
    __syncthreads();
    if (tile.lacks[2] && thread < kSide)
      for (int i = 1; i < kSide; ++i) x[0][thread] += x[i][thread];
    __syncthreads();
    if (tile.lacks[3] && thread < (tile.lacks[2] ? 1 : kSide))
      for (int i = 1; i < kSide; ++i) x[thread][0] += x[thread][i];
    __syncthreads();
    const AttentionArguments& args = work.args;
    const tea_bias_strides& stride = args.bias.gradient_stride;
    const int64_t rows = tile.lacks[2] ? 1 : args.queries.max_seqlen - tile.row;
    const int64_t columns = tile.lacks[3] ? 1 : args.keys.max_seqlen - tile.column;
    const int64_t at = tile.batch * stride.batch + tile.head * stride.head + tile.row * stride.row +
                       tile.column * stride.col;
    for (int n = thread; n < kSide * kSide; n += kThreads) {
      const int row = n / kSide, column = n % kSide;
      if (row < rows && column < columns)
        store_float(args.bias.gradient, args.bias.dtype,
                    at + row * stride.row + column * stride.col, x[row][column]);
    }
  }
};

enum Pass { kKeys, kQueries, kBias };

// Named by numbers: see hopper/forward_launch.cuh.
template <int kDtype, int kPass>
__global__ void __launch_bounds__(kThreads) entry(const __grid_constant__ Parameters p) {
  extern __shared__ __align__(128) uint8_t memory[];
  using W = Wide<kDtype>;
  W wide(p.work, *reinterpret_cast<typename W::Smem*>(memory));
  const AttentionArguments& args = p.work.args;
  int64_t n = blockIdx.x;
  const auto next = [&n](int64_t count) {
    const int64_t at = n % count;
    n /= count;
    return at;
  };
  if constexpr (kPass == kBias) {
    const int lacks = args.bias.broadcast;
    const int64_t column = next(p.across) * kSide, row = next(p.tiles) * kSide;
    const int64_t head = next(lacks & TEA_BROADCAST_HEAD ? 1 : args.heads_q);
    wide.bias({n,
               head,
               row,
               column,
               {(lacks & TEA_BROADCAST_BATCH) != 0, (lacks & TEA_BROADCAST_HEAD) != 0,
                (lacks & TEA_BROADCAST_ROW) != 0, (lacks & TEA_BROADCAST_COL) != 0}});
  } else {
    const int begin = static_cast<int>(next(p.pieces)) * W::kPiece;
    const int first = static_cast<int>(next(p.tiles)) * kSide;
    const int64_t head = next(kPass == kKeys ? args.heads_kv : args.heads_q);
    if constexpr (kPass == kKeys)
      wide.keys(n, head, first, begin);
    else
      wide.queries(n, head, first, begin);
  }
}

template <int kDtype, int kPass>
void launch_tiles(Parameters p, int dim, int64_t others, cudaStream_t stream) {
  static OncePerDevice allowed;
  using W = Wide<kDtype>;
  p.pieces = (dim + W::kPiece - 1) / W::kPiece;
  const int64_t blocks = p.tiles * p.across * p.pieces * others;
  if (blocks == 0) return;
  const Launch how{"backward, in pieces", static_cast<unsigned>(blocks), kThreads,
                   sizeof(typename W::Smem)};
  allow_shared(how, entry<kDtype, kPass>, allowed);
  launch(how, entry<kDtype, kPass>, stream, p);
}

template <int kPass>
void launch_pass(const Parameters& p, int dim, int64_t others, cudaStream_t stream) {
  switch (tile_type(p.work.args)) {
    case TEA_FP16:
      return launch_tiles<TEA_FP16, kPass>(p, dim, others, stream);
    case TEA_BF16:
      return launch_tiles<TEA_BF16, kPass>(p, dim, others, stream);
    default:
      return launch_tiles<TEA_FP32, kPass>(p, dim, others, stream);
  }
}

int64_t tiles(int64_t n) { return (n + kSide - 1) / kSide; }

}  // namespace

void wide_keys(const BackwardArguments& work, cudaStream_t stream) {
  const AttentionArguments& args = work.args;
  launch_pass<kKeys>({work, tiles(args.keys.max_seqlen), 1, 0}, std::max(args.dim_qk, args.dim_v),
                     args.heads_kv * args.batch, stream);
}

void wide_queries(const BackwardArguments& work, cudaStream_t stream) {
  const AttentionArguments& args = work.args;
  launch_pass<kQueries>({work, tiles(args.queries.max_seqlen), 1, 0}, args.dim_qk,
                        args.heads_q * args.batch, stream);
}

void wide_bias(const BackwardArguments& work, cudaStream_t stream) {
  const AttentionArguments& args = work.args;
  const int lacks = args.bias.broadcast;
  const int64_t batch = lacks & TEA_BROADCAST_BATCH ? 1 : work.bias_batch;
  const int64_t heads = lacks & TEA_BROADCAST_HEAD ? 1 : args.heads_q;
  const int64_t down = lacks & TEA_BROADCAST_ROW ? 1 : tiles(args.queries.max_seqlen);
  const int64_t across = lacks & TEA_BROADCAST_COL ? 1 : tiles(args.keys.max_seqlen);
  launch_pass<kBias>({work, down, across, 0}, 1, batch * heads, stream);
}

}  // namespace tea::portable
