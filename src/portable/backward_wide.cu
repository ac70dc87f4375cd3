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
  BackwardWork work;
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

  const BackwardWork& work;
  Smem& s;
  const Factors f;
  float largest_ds = 0;

  TEA_DEVICE Wide(const BackwardWork& from, Smem& smem)
      : work(from), s(smem), f(factors_of(from.w)) {}

  static TEA_DEVICE int down() { return warp() % kWarpsDown * 16; }
  static TEA_DEVICE int across() { return warp() / kWarpsDown; }
  TEA_DEVICE Operand left() const { return {shared_address(s.left)}; }
  TEA_DEVICE Operand right() const { return {shared_address(s.right)}; }
  TEA_DEVICE Tile<kDtype, kSide> p() const { return {shared_address(s.p)}; }
  TEA_DEVICE Tile<kDtype, kSide> ds() const { return {shared_address(s.ds)}; }

  // Rows of a tensor on the side of the queries, or of the keys, as far as they matter.
  TEA_DEVICE void load(const Operand& to, const Rows& rows, const Item& item, bool queries,
                       int64_t head, int first, int begin, int dim) const {
    const Work& w = work.w;
    const int64_t at = queries ? first_element(rows, w.queries, item.q, item.b, head)
                               : first_element(rows, w.keys, item.kv, item.b, head);
    load_rows<true, kSide, kThreads>(to, rows, at, first,
                                     queries ? seeing_rows(item) : item.attended, begin, dim);
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
  TEA_DEVICE void product(Scores& x, const Rows& rows, const Rows& keys, const Item& item,
                          int64_t head, At at, int dim) const {
    const int64_t kv_head = head / (work.w.heads_q / work.w.heads_kv);
    for (int begin = 0; begin < dim; begin += kPiece) {
      __syncthreads();
      load(left(), rows, item, true, head, at.row, begin, dim);
      load(right(), keys, item, false, kv_head, at.key, begin, dim);
      arrive();
      multiply_tiles<kDtype, kPiece / 16, Summed::kAlongRows, Summed::kAlongRows>(
          x, left(), down(), right(), across() * 8 * kTiles);
    }
  }

  TEA_DEVICE void row_sums(const float* from, int64_t entry, const Item& item, int row,
                           float (&to)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int i = row + row_of(2 * r);
      to[r] = i < item.q.length ? from[entry + i] : 0.0f;
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
  TEA_DEVICE void gradients(Scores& x, const Item& item, const Head& head, At at, bool wants_p,
                            bool wants_bend) {
    const Work& w = work.w;
    const int64_t entry = first_entry(work, item, head.number);
    const int row = at.row + down();
    const Strip<kTiles> strip{w, item, head, row, at.key + across() * 8 * kTiles};
    float bend[kTiles][4], lse2[2], delta[2];
    product(x, w.q, w.k, item, head.number, at, w.dim_qk);
    row_sums(work.sums.lse2, entry, item, row, lse2);
    strip.weigh(x[0], bend, f.scores, lse2);
    if (wants_p) put(p(), x, [&](float value) { return strip.operand(value, f.p); });
    if (wants_bend)
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) x[0][n][i] *= fmaxf(bend[n][i], 0.0f);
    Scores dp = {};
    product(dp, w.dout, w.v, item, head.number, at, w.dim_v);
    row_sums(work.sums.delta, entry, item, row, delta);
    strip.slope(x[0], dp[0], f.dprob, delta);
  }
  TEA_DEVICE void put_gradients(const Scores& x, const Item& item, const Head& head) {
    const Strip<kTiles> strip{work.w, item, head, 0, 0};
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
    const Work& w = work.w;
    const Item item = item_of(w, b);
    const int group = w.heads_q / w.heads_kv;
    const Columns rows = seeing_rows(item, first, min(int64_t{first} + kSide, item.kv.length));
    Output dk = {}, dv = {};
    for (int64_t h = kv_head * group; h < (kv_head + 1) * group; ++h) {
      const Head head = head_of(w, item, h);
      for (int row = static_cast<int>(rows.begin) / kSide * kSide; row < rows.end; row += kSide) {
        Scores x = {};
        gradients(x, item, head, {row, first}, true, true);
        put_gradients(x, item, head);
        __syncthreads();
        load(left(), w.q, item, true, h, row, begin, w.dim_qk);
        load(right(), w.dout, item, true, h, row, begin, w.dim_v);
        arrive();
        const int column = across() * 8 * kOutTiles;
        multiply_tiles<kDtype, kSide / 16, Summed::kAcrossRows, Summed::kAcrossRows>(
            dk, ds(), down(), left(), column);
        multiply_tiles<kDtype, kSide / 16, Summed::kAcrossRows, Summed::kAcrossRows>(
            dv, p(), down(), right(), column);
      }
    }
    const int64_t all = w.keys.form == TEA_RAGGED ? item.kv.length : w.keys.capacity;
    const auto place = [&](const Rows& to) {
      return first_element(to, w.keys, item.kv, b, kv_head);
    };
    store(dk, {w.dk, place(w.dk), begin, w.dim_qk, f.dk, scalar(w.scales.dk), w.scales.dk_amax},
          first, all, item.attended);
    store(dv, {w.dv, place(w.dv), begin, w.dim_v, f.dv, scalar(w.scales.dv), w.scales.dv_amax},
          first, all, item.attended);
    raise_by_warp(w.scales.dp_amax, largest_ds);
  }

  TEA_DEVICE void queries(int64_t b, int64_t h, int first, int begin) {
    const Work& w = work.w;
    const Item item = item_of(w, b);
    const Head head = head_of(w, item, h);
    const int64_t kv_head = h / (w.heads_q / w.heads_kv);
    Columns rows = seeing_rows(item);
    rows = {max(rows.begin, int64_t{first}), min(rows.end, int64_t{first} + kSide)};
    const Columns keys = rows.begin < rows.end ? seen_keys(item, rows.begin, rows.end) : Columns{};
    Output dq = {};
    for (int key = static_cast<int>(keys.begin) / kSide * kSide; key < keys.end; key += kSide) {
      Scores x = {};
      gradients(x, item, head, {first, key}, false, true);
      put_gradients(x, item, head);
      __syncthreads();
      load(right(), w.k, item, false, kv_head, key, begin, w.dim_qk);
      arrive();
      multiply_tiles<kDtype, kSide / 16, Summed::kAlongRows, Summed::kAcrossRows>(
          dq, ds(), down(), right(), across() * 8 * kOutTiles);
    }
    const int64_t all = w.queries.form == TEA_RAGGED ? item.q.length : w.queries.capacity;
    const int64_t place = first_element(w.dq, w.queries, item.q, b, h);
    store(dq, {w.dq, place, begin, w.dim_qk, f.dq, scalar(w.scales.dq), w.scales.dq_amax}, first,
          all, rows);
  }

  // The part of dBias at `tile`, of one (batch, head), from all that shares it.
  struct BiasTile {
    int64_t batch, head, row, column;
    bool lacks[4];
  };
  TEA_DEVICE void bias(const BiasTile& tile) {
    const Work& w = work.w;
    const bool pre = w.bias.kind == TEA_BIAS_PRE_SCALE;
    Scores sum = {};
    const int64_t last_b = tile.lacks[0] ? w.batch : min(tile.batch + 1, w.batch);
    const int64_t last_h = tile.lacks[1] ? w.heads_q : tile.head + 1;
    for (int64_t b = tile.batch; b < last_b; ++b) {
      const Item item = item_of(w, b);
      const int64_t last_row = tile.lacks[2] ? item.q.length : min(tile.row + 1, item.q.length);
      for (int64_t h = tile.head; h < last_h; ++h) {
        const Head head = head_of(w, item, h);
        for (int64_t row = tile.row; row < last_row; row += kSide) {
          Columns rows = seeing_rows(item);
          rows = {max(rows.begin, row), min(rows.end, row + kSide)};
          if (rows.begin >= rows.end) continue;
          Columns keys = seen_keys(item, rows.begin, rows.end);
          keys = {max(keys.begin / kSide * kSide, tile.column),
                  tile.lacks[3] ? keys.end : min(keys.end, tile.column + 1)};
          for (int64_t key = keys.begin; key < keys.end; key += kSide) {
            Scores x = {};
            gradients(x, item, head, {static_cast<int>(row), static_cast<int>(key)}, false, pre);
#pragma unroll
            for (int n = 0; n < kTiles; ++n)
#pragma unroll
              for (int i = 0; i < 4; ++i) sum[0][n][i] += x[0][n][i] * (pre ? w.scale : 1.0f);
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
    const Work& w = work.w;
    const tea_bias_strides& stride = w.bias.gradient_stride;
    const int64_t rows = tile.lacks[2] ? 1 : w.queries.capacity - tile.row;
    const int64_t columns = tile.lacks[3] ? 1 : w.keys.capacity - tile.column;
    const int64_t at = tile.batch * stride.batch + tile.head * stride.head + tile.row * stride.row +
                       tile.column * stride.col;
    for (int n = thread; n < kSide * kSide; n += kThreads) {
      const int row = n / kSide, column = n % kSide;
      if (row < rows && column < columns)
        store_float(w.bias.gradient, w.bias.dtype, at + row * stride.row + column * stride.col,
                    x[row][column]);
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
  const Work& w = p.work.w;
  int64_t n = blockIdx.x;
  const auto next = [&n](int64_t count) {
    const int64_t at = n % count;
    n /= count;
    return at;
  };
  if constexpr (kPass == kBias) {
    const int lacks = w.bias.broadcast;
    const int64_t column = next(p.across) * kSide, row = next(p.tiles) * kSide;
    const int64_t head = next(lacks & TEA_BROADCAST_HEAD ? 1 : w.heads_q);
    wide.bias({n,
               head,
               row,
               column,
               {(lacks & TEA_BROADCAST_BATCH) != 0, (lacks & TEA_BROADCAST_HEAD) != 0,
                (lacks & TEA_BROADCAST_ROW) != 0, (lacks & TEA_BROADCAST_COL) != 0}});
  } else {
    const int begin = static_cast<int>(next(p.pieces)) * W::kPiece;
    const int first = static_cast<int>(next(p.tiles)) * kSide;
    const int64_t head = next(kPass == kKeys ? w.heads_kv : w.heads_q);
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
  switch (tile_type(p.work.w)) {
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

void wide_keys(const BackwardWork& work, cudaStream_t stream) {
  const Work& w = work.w;
  launch_pass<kKeys>({work, tiles(w.keys.capacity), 1, 0}, std::max(w.dim_qk, w.dim_v),
                     w.heads_kv * w.batch, stream);
}

void wide_queries(const BackwardWork& work, cudaStream_t stream) {
  const Work& w = work.w;
  launch_pass<kQueries>({work, tiles(w.queries.capacity), 1, 0}, w.dim_qk, w.heads_q * w.batch,
                        stream);
}

void wide_bias(const BackwardWork& work, cudaStream_t stream) {
  const Work& w = work.w;
  const int lacks = w.bias.broadcast;
  const int64_t batch = lacks & TEA_BROADCAST_BATCH ? 1 : work.bias_batch;
  const int64_t heads = lacks & TEA_BROADCAST_HEAD ? 1 : w.heads_q;
  const int64_t down = lacks & TEA_BROADCAST_ROW ? 1 : tiles(w.queries.capacity);
  const int64_t across = lacks & TEA_BROADCAST_COL ? 1 : tiles(w.keys.capacity);
  launch_pass<kBias>({work, down, across, 0}, 1, batch * heads, stream);
}

}  // namespace tea::portable
