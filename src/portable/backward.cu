// The backward pass on any GPU from sm_80 on, for 16-bit types and fp8: FlashAttention-2's plan
// (Dao, 2023). A block of threads keeps a tile of keys and values and the sums of their gradients,
// and walks over the query rows that see them, of each head that shares them; what a tile of rows
// gets of dQ is added to sums in memory.
//
//   load Q', dO' | S = Q K^T | P = exp(S - LSE) | dP = dO V^T | dS = P (dP - delta) | barrier
//   dV += P^T dO | dK += dS^T Q | dQ = dS K, added in memory | barrier
//
// Before it run prepare_rows (LSE, delta) and after it finish_dq. dQ that must not be added in any
// order is in backward_queries.cu; dBias, and what does not fit here (fp32, head dimensions beyond
// the table, GPUs with little shared memory), in backward_wide.cu.
#include <cstddef>

#include "core/error.h"
#include "portable/backward.h"
#include "portable/backward_launch.cuh"
#include "portable/device/gradient.cuh"
#include "portable/gaps.h"
#include "portable/limits.h"

namespace tea::portable {
namespace {

// One row of the table: a shape of tile that fits the registers and the shared memory.
struct Row {
  // Any score function, type, alignment and dropout; else scores go straight from scale to mask,
  // and 16 bytes of any tensor can be copied.
  bool general;
  int dim;         // both head dimensions are at most this
  int rows, cols;  // of a tile: queries and keys
  int warps;
  // How many warps share the first dimension of S and dP, of dK and dV, of dQ.
  int scores_down, keys_down, queries_down;
  int stages;  // tiles of Q and dO in shared memory
};

// The first row that fits serves. General rows have little to do for each thread, which keeps the
// rules' registers out of memory; they serve plain scores too where shared memory is too small for
// the plain row: their head dimensions up to 128 fit 99 KB (sm_86, sm_89, sm_120).
constexpr Row kTable[] = {
    // general dim rows cols warps, down: S dK dQ, stages
    {false, 64, 128, 128, 8, 2, 4, 4, 2}, {false, 128, 64, 128, 8, 2, 2, 2, 2},
    {false, 256, 64, 64, 8, 4, 2, 2, 2},  {true, 64, 64, 64, 8, 4, 4, 4, 2},
    {true, 128, 64, 64, 8, 4, 4, 4, 1},   {true, 256, 64, 64, 8, 4, 4, 4, 2},
};

// What names a kernel: the even ones are for bf16.
struct Config {
  Row row;
  int dtype;
};
constexpr Config config(int number) {
  return {kTable[number / 2], number % 2 ? +TEA_FP16 : +TEA_BF16};
}

struct Parameters {
  BackwardArguments work;
  int tiles;  // of the keys of a sequence
  float scale_log2;
};

template <Config C>
struct Kernel {
  static constexpr int kDtype = C.dtype, kDim = C.row.dim, kRows = C.row.rows, kCols = C.row.cols;
  static constexpr int kWarps = C.row.warps, kThreads = 32 * kWarps, kStages = C.row.stages;
  static constexpr bool kGeneral = C.row.general;
  using Operand = Tile<kDtype, kDim>;
  using Square = Tile<kDtype, kCols>;

  // The warps share a matrix of kHeight x kWidth.
  template <int kHeight, int kWidth, int kDown>
  struct Share {
    static constexpr int kHigh = kHeight / kDown, kWide = kWidth / (kWarps / kDown);
    static_assert(kHigh % 16 == 0 && kWide % 16 == 0 && kWarps % kDown == 0);
    using Sums = float[kHigh / 16][kWide / 8][4];
    static constexpr int kRows16 = kHigh / 16, kTiles = kWide / 8;
    static TEA_DEVICE int row(int warp) { return warp % kDown * kHigh; }
    static TEA_DEVICE int column(int warp) { return warp / kDown * kWide; }
  };
  using OfScores = Share<kRows, kCols, C.row.scores_down>;
  using OfKeys = Share<kCols, kDim, C.row.keys_down>;
  using OfQueries = Share<kRows, kDim, C.row.queries_down>;

  struct Smem {
    alignas(128) uint8_t k[kCols * kDim * 2];
    alignas(128) uint8_t v[kCols * kDim * 2];
    alignas(128) uint8_t q[kStages][kRows * kDim * 2];
    alignas(128) uint8_t dout[kStages][kRows * kDim * 2];
    alignas(128) uint8_t p[kRows * kCols * 2];
    alignas(128) uint8_t ds[kRows * kCols * 2];
    float lse2[kStages][kRows], delta[kStages][kRows];
  };
  static_assert(sizeof(Smem) <= 227 * 1024, "the shared-memory plan does not fit");

  // The tiles of rows that a block walks over: of each head from the last row up.
  struct Walk {
    int head, first, stop, restart;
    TEA_DEVICE void advance() {
      if (first == stop)
        first = restart, ++head;
      else
        first -= kRows;
    }
  };

  // What the block works on, as far as the plain rules need it: all positions fit 32 bits.
  struct Block {
    const Parameters& p;
    Smem& s;
    const SequencePair seq;
    const int kv_head, key;     // the first key
    const int low, high, keys;  // the band, and the keys of the sequence
    const Columns seeing;       // rows of the sequence that see anything
    int begin, end;             // rows that see these keys
  };

  static TEA_DEVICE int within_int(int64_t x) {
    return static_cast<int>(max(min(x, int64_t{1} << 30), -(int64_t{1} << 30)));
  }
  static TEA_DEVICE Block block_of(const Parameters& p, Smem& s) {
    const AttentionArguments& args = p.work.args;
    const unsigned n = blockIdx.x, tile = n % p.tiles, rest = n / p.tiles;
    const SequencePair seq = sequence_pair_of(args, rest / args.heads_kv);
    const int key = static_cast<int>(tile) * kCols, keys = static_cast<int>(seq.kv.length);
    const Columns rows = seeing_rows(seq, key, min(key + kCols, keys));
    return {p,
            s,
            seq,
            static_cast<int>(rest % args.heads_kv),
            key,
            within_int(seq.band.lo),
            within_int(seq.band.hi),
            keys,
            seeing_rows(seq),
            within_int(rows.begin),
            key < keys ? within_int(rows.end) : 0};
  }

  static TEA_DEVICE void load_keys(const Block& k, const Operand& to, const StridedTensor& rows,
                                   int dim) {
    const int64_t at = first_element(rows, k.p.work.args.keys, k.seq.kv, k.seq.batch, k.kv_head);
    load_rows<kGeneral, kCols, kThreads>(to, rows, at, k.key, k.seq.attended, 0, dim);
  }
  static TEA_DEVICE void load_queries(const Block& k, const Operand& to, const StridedTensor& rows,
                                      int dim, const Walk& at) {
    const int64_t from = first_element(rows, k.p.work.args.queries, k.seq.q, k.seq.batch, at.head);
    load_rows<kGeneral, kRows, kThreads>(to, rows, from, at.first, k.seeing, 0, dim);
  }
  static TEA_DEVICE void load_step(const Block& k, const Walk& at, int stage) {
    const AttentionArguments& args = k.p.work.args;
    const RowSums& sums = k.p.work.sums;
    load_queries(k, {shared_address(k.s.q[stage])}, args.q, args.dim_qk, at);
    load_queries(k, {shared_address(k.s.dout[stage])}, args.dout, args.dim_v, at);
    const int i = afresh_thread(static_cast<int>(threadIdx.x)), row = at.first + i;
    if (i < kRows) {
      const bool valid = row >= k.seeing.begin && row < k.seeing.end;
      const int64_t entry = valid ? first_entry(k.p.work, k.seq, at.head) + row : 0;
      copy_4(shared_address(&k.s.lse2[stage][i]), sums.lse2 + entry, valid);
      copy_4(shared_address(&k.s.delta[stage][i]), sums.delta + entry, valid);
    }
    commit_copies();
  }

  // Where a warp's accumulators of scores lie.
  struct Spot {
    int row, column;  // in the tile
    int lane;
    TEA_DEVICE int row_at(int m, int half) const { return row + 16 * m + 8 * half + lane / 4; }
    TEA_DEVICE int column_at(int n) const { return column + 8 * n + lane % 4 * 2; }
  };
  using Scores = typename OfScores::Sums;

  // Calls change(element) for what the band or the ends of the sequences hide.
  template <class Change>
  static TEA_DEVICE void each_hidden(const Block& k, const Spot& at, int first, Scores& x,
                                     Change&& change) {
    const int left = k.key + at.column_at(0);
#pragma unroll
    for (int m = 0; m < OfScores::kRows16; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = first + at.row_at(m, half);
        const bool any = row >= k.begin && row < k.end;
        const int begin = any ? row + k.low - left : kCols;
        const int end = min(row + k.high + 1, k.keys) - left;
#pragma unroll
        for (int n = 0; n < OfScores::kTiles; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e)
            if (8 * n + e < begin || 8 * n + e >= end) change(x[m][n][2 * half + e]);
      }
  }
  static TEA_DEVICE bool sees_all(const Block& k, int first) {
    return first >= k.begin && first + kRows <= k.end && k.key + kCols <= k.keys &&
           k.key + kCols - 1 - first <= k.high && k.key - (first + kRows - 1) >= k.low;
  }

  // The 16 rows of scores number m.
  template <class Value>
  static TEA_DEVICE void put_strip(const Square& tile, const Spot& at, const Scores& x, int m,
                                   Value&& value) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int n = 0; n < OfScores::kTiles; ++n)
        store_two(tile, at.row_at(m, half), at.column_at(n), value(x[m][n][2 * half]),
                  value(x[m][n][2 * half + 1]));
  }
  static TEA_DEVICE void put(const Square& tile, const Spot& at, const Scores& x) {
#pragma unroll
    for (int m = 0; m < OfScores::kRows16; ++m)
      put_strip(tile, at, x, m, [](float same) { return same; });
  }
  static TEA_DEVICE void row_values(const float* from, const Spot& at, int m, float (&to)[2]) {
    to[0] = from[at.row_at(m, 0)], to[1] = from[at.row_at(m, 1)];
  }

  // S, P, dP and dS of one tile; the operands P and dS go to shared memory.
  static TEA_DEVICE void plain_scores(const Block& k, const Walk& at, int stage, const Spot& spot) {
    const Operand q{shared_address(k.s.q[stage])}, dout{shared_address(k.s.dout[stage])};
    const bool all = sees_all(k, at.first);
    Scores x = {}, dp = {};
    multiply_tiles<kDtype, kDim / 16, Summed::kAlongRows, Summed::kAlongRows>(
        x, q, spot.row, Operand{shared_address(k.s.k)}, spot.column);
    if (!all) each_hidden(k, spot, at.first, x, [](float& hidden) { hidden = kMinusInfinity; });
#pragma unroll
    for (int m = 0; m < OfScores::kRows16; ++m) {
      float lse2[2];
      row_values(k.s.lse2[stage], spot, m, lse2);
#pragma unroll
      for (int n = 0; n < OfScores::kTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          x[m][n][i] = probability(x[m][n][i], k.p.scale_log2, lse2[row_slot(i)]);
    }
    put({shared_address(k.s.p)}, spot, x);
    multiply_tiles<kDtype, kDim / 16, Summed::kAlongRows, Summed::kAlongRows>(
        dp, dout, spot.row, Operand{shared_address(k.s.v)}, spot.column);
#pragma unroll
    for (int m = 0; m < OfScores::kRows16; ++m) {
      float delta[2];
      row_values(k.s.delta[stage], spot, m, delta);
#pragma unroll
      for (int n = 0; n < OfScores::kTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) x[m][n][i] *= dp[m][n][i] - delta[row_slot(i)];
    }
    if (!all) each_hidden(k, spot, at.first, x, [](float& hidden) { hidden = 0; });
    put({shared_address(k.s.ds)}, spot, x);
  }

  static TEA_DEVICE void general_scores(const Block& k, const Walk& at, int stage, const Spot& spot,
                                        float* largest) {
    const AttentionArguments& args = k.p.work.args;
    const Factors f = factors_of(args);
    const Head head = head_of(args, k.seq, at.head);
    const Operand q{shared_address(k.s.q[stage])}, dout{shared_address(k.s.dout[stage])};
    const auto strip = [&](int m) {
      return Strip<OfScores::kTiles>{args, k.seq, head, at.first + spot.row + 16 * m,
                                     k.key + spot.column};
    };
    Scores x = {}, dp = {};
    multiply_tiles<kDtype, kDim / 16, Summed::kAlongRows, Summed::kAlongRows>(
        x, q, spot.row, Operand{shared_address(k.s.k)}, spot.column);
#pragma unroll
    for (int m = 0; m < OfScores::kRows16; ++m) {
      float lse2[2], bend[OfScores::kTiles][4];
      row_values(k.s.lse2[stage], spot, m, lse2);
      strip(m).weigh(x[m], bend, f.scores, lse2);
      put_strip({shared_address(k.s.p)}, spot, x, m,
                [&](float p) { return strip(m).operand(p, f.p); });
#pragma unroll
      for (int n = 0; n < OfScores::kTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) x[m][n][i] *= fmaxf(bend[n][i], 0.0f);
    }
    multiply_tiles<kDtype, kDim / 16, Summed::kAlongRows, Summed::kAlongRows>(
        dp, dout, spot.row, Operand{shared_address(k.s.v)}, spot.column);
#pragma unroll
    for (int m = 0; m < OfScores::kRows16; ++m) {
      float delta[2];
      row_values(k.s.delta[stage], spot, m, delta);
      strip(m).slope(x[m], dp[m], f.dprob, delta);
      put_strip({shared_address(k.s.ds)}, spot, x, m,
                [&](float ds) { return strip(m).slope_operand(ds, f, largest); });
    }
  }

  using QuerySums = typename OfQueries::Sums;

  // kWhole: the walk sees all of the warp's rows, and the sums have all of its dimensions.
  template <bool kWhole>
  static TEA_DEVICE void add_to_sums(const Block& k, const Walk& at, const QuerySums& dq, int row,
                                     int column, int lane) {
    const RowSums& sums = k.p.work.sums;
    const int64_t first = first_entry(k.p.work, k.seq, at.head);
    const int length = static_cast<int>(k.seq.q.length);
#pragma unroll
    for (int m = 0; m < OfQueries::kRows16; ++m) {
      const int top = at.first + row + 16 * m;
      const DqBlock block = dq_block(sums, first, top, length);
      float* to = block.at(lane / 4, column) + lane % 4 * 4;
#pragma unroll
      for (int half = 0; half < 2; ++half, to += 8 * block.row) {
        const int r = top + 8 * half + lane / 4;
        const bool seen = r >= k.begin && r < k.end;
#pragma unroll
        for (int n = 0; n < OfQueries::kTiles; n += 2)
          if (kWhole || (seen && column + 8 * n < sums.width))
            add_4(to + n / 2 * block.dims, dq[m][n][2 * half], dq[m][n][2 * half + 1],
                  dq[m][n + 1][2 * half], dq[m][n + 1][2 * half + 1]);
      }
    }
  }
  // dS K, added to the sums of the rows.
  static TEA_DEVICE void add_dq(const Block& k, const Walk& at, int thread) {
    const int row = OfQueries::row(thread / 32), column = OfQueries::column(thread / 32);
    QuerySums dq = {};
    multiply_tiles<kDtype, kCols / 16, Summed::kAlongRows, Summed::kAcrossRows>(
        dq, Square{shared_address(k.s.ds)}, row, Operand{shared_address(k.s.k)}, column);
    const int first = at.first + row;
    if (first >= k.begin && first + OfQueries::kHigh <= k.end &&
        column + OfQueries::kWide <= k.p.work.sums.width)
      add_to_sums<true>(k, at, dq, row, column, thread % 32);
    else
      add_to_sums<false>(k, at, dq, row, column, thread % 32);
  }

  using KeySums = typename OfKeys::Sums;

  // Keys of the tile as far as the tensor has them; those that no row sees as zeros.
  static TEA_DEVICE void put_plain(const Block& k, const KeySums& x, const Operand& tile,
                                   float factor) {
    const int row = OfKeys::row(warp()), column = OfKeys::column(warp());
#pragma unroll
    for (int m = 0; m < OfKeys::kRows16; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int r = row + 16 * m + 8 * half + lane() / 4;
        const bool any = k.key + r >= k.seq.attended.begin && k.key + r < k.seq.attended.end;
#pragma unroll
        for (int n = 0; n < OfKeys::kTiles; ++n)
          store_two(tile, r, column + 8 * n + lane() % 4 * 2,
                    any ? x[m][n][2 * half] * factor : 0.0f,
                    any ? x[m][n][2 * half + 1] * factor : 0.0f);
      }
  }
  static TEA_DEVICE void store_plain(const Block& k, const Operand& tile, const Result& to,
                                     int64_t count) {
    constexpr int kPieces = Operand::kPieces;
#pragma unroll
    for (int i = 0; i < kCols * kPieces / kThreads; ++i) {
      const int n = i * kThreads + static_cast<int>(threadIdx.x), r = n / kPieces, c = n % kPieces;
      if (k.key + r >= count || c * 8 >= to.dim) continue;
      const int64_t at = to.head_element + (k.key + r) * to.rows.seq + c * 8;
      *reinterpret_cast<uint4*>(static_cast<uint16_t*>(to.rows.data) + at) =
          load_shared_16(tile.piece(r, c));
    }
  }
  // Through the memory of K and V together as fp32.
  static TEA_DEVICE void store_general(const Block& k, const KeySums& x, const Result& to,
                                       int64_t count) {
    static_assert(offsetof(Smem, v) == sizeof k.s.k);
    float(*const sums)[kDim] = reinterpret_cast<float(*)[kDim]>(k.s.k);
    const int row = OfKeys::row(warp()), column = OfKeys::column(warp());
    __syncthreads();
#pragma unroll
    for (int m = 0; m < OfKeys::kRows16; ++m)
#pragma unroll
      for (int n = 0; n < OfKeys::kTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          sums[row + 16 * m + row_of(i)][column + column_of(n, i)] = x[m][n][i];
    __syncthreads();
    store_sums<kCols, kDim, kThreads>(sums, to, k.key, count, k.seq.attended);
  }
  static TEA_DEVICE void store_keys(const Block& k, const KeySums& dk, const KeySums& dv) {
    const AttentionArguments& args = k.p.work.args;
    const Factors f = factors_of<!kGeneral>(args);
    const auto place = [&](const StridedTensor& to) {
      return first_element(to, args.keys, k.seq.kv, k.seq.batch, k.kv_head);
    };
    const int64_t count = args.keys.form == TEA_RAGGED ? k.seq.kv.length : args.keys.max_seqlen;
    const Result to_dk = {
        args.dk, place(args.dk), 0, args.dim_qk, f.dk, scalar(args.fp8.dk), args.fp8.dk_amax};
    const Result to_dv = {args.dv,         place(args.dv), 0, args.dim_v, f.dv, scalar(args.fp8.dv),
                          args.fp8.dv_amax};
    if constexpr (kGeneral) {
      store_general(k, dk, to_dk, count);
      store_general(k, dv, to_dv, count);
    } else {
      const Operand keys{shared_address(k.s.k)}, values{shared_address(k.s.v)};
      put_plain(k, dk, keys, to_dk.factor);
      put_plain(k, dv, values, to_dv.factor);
      __syncthreads();
      store_plain(k, keys, to_dk, count);
      store_plain(k, values, to_dv, count);
    }
  }

  static TEA_DEVICE void body(const Parameters& p) {
    extern __shared__ __align__(128) uint8_t memory[];
    const Block k = block_of(p, *reinterpret_cast<Smem*>(memory));
    const AttentionArguments& args = p.work.args;
    const Operand keys{shared_address(k.s.k)}, values{shared_address(k.s.v)};
    const int group = args.heads_q / args.heads_kv, first_head = k.kv_head * group;
    const int stop = k.begin / kRows * kRows, tiles = (k.end - stop + kRows - 1) / kRows;
    const int count = k.begin < k.end ? tiles * group : 0;
    const int last = stop + (tiles - 1) * kRows;
    Walk next{first_head, last, stop, last}, at = next;
    typename OfKeys::Sums dk = {}, dv = {};
    float largest = 0;
    if (count > 0) {
      load_keys(k, keys, args.k, args.dim_qk);
      load_keys(k, values, args.v, args.dim_v);
      load_step(k, next, 0);
    }
    for (int n = 0; n < count; ++n, at.advance()) {
      const int stage = kStages == 2 ? n & 1 : 0;
      wait_copies<0>();
      __syncthreads();
      next.advance();
      if (kStages == 2 && n + 1 < count) load_step(k, next, stage ^ 1);
      const int thread = afresh_thread(static_cast<int>(threadIdx.x));
      const Spot spot{OfScores::row(thread / 32), OfScores::column(thread / 32), thread % 32};
      if constexpr (kGeneral)
        general_scores(k, at, stage, spot, &largest);
      else
        plain_scores(k, at, stage, spot);
      __syncthreads();
      const int row = OfKeys::row(thread / 32), column = OfKeys::column(thread / 32);
      const Square probabilities{shared_address(k.s.p)}, ds{shared_address(k.s.ds)};
      multiply_tiles<kDtype, kRows / 16, Summed::kAcrossRows, Summed::kAcrossRows>(
          dv, probabilities, row, Operand{shared_address(k.s.dout[stage])}, column);
      multiply_tiles<kDtype, kRows / 16, Summed::kAcrossRows, Summed::kAcrossRows>(
          dk, ds, row, Operand{shared_address(k.s.q[stage])}, column);
      if (p.work.sums.dq) add_dq(k, at, thread);
      if (kStages == 1 && n + 1 < count) {
        __syncthreads();
        load_step(k, next, 0);
      }
    }
    __syncthreads();
    store_keys(k, dk, dv);
    if constexpr (kGeneral) raise_by_warp(args.fp8.dp_amax, largest);
  }
};

struct Pass {
  static constexpr const auto& table = kTable;
  static constexpr const char* name = "backward";
  using Parameters = portable::Parameters;
  template <int kNumber>
  using Kernel = portable::Kernel<config(kNumber)>;
  template <class K>
  static int64_t tiles(const AttentionArguments& args) {
    return (args.keys.max_seqlen + K::kCols - 1) / K::kCols;
  }
  static int64_t heads(const AttentionArguments& args) { return args.heads_kv; }
};

// Null: none fits.
const Choice<Pass>* choose(const AttentionArguments& args, const Device& device) {
  const bool general = !is_plain(args, {&args.q, &args.k, &args.v, &args.dout, &args.dk, &args.dv});
  return choose<Pass>(args, device, [&](const Row& row) { return row.general || !general; });
}

// The workspace in pieces of a multiple of 256 bytes, all but dq always.
struct Plan {
  int64_t rows;
  int32_t width;
  uint64_t per_row, dq;  // bytes
};
Plan plan_of(const Problem& p, const Geometry& g) {
  const auto piece = [](int64_t floats) {
    return static_cast<uint64_t>(floats * 4 + 255) / 256 * 256;
  };
  const int64_t rows = p.q_form == TEA_RAGGED ? g.tokens_q : g.batch * g.max_q;
  const int32_t width = (p.dim_qk + 15) / 16 * 16;
  const bool adds = !p.deterministic && p.dtype != TEA_FP32 && p.dim_qk <= 256 && p.v_dim() <= 256;
  return {rows, width, piece(rows * p.heads_q), adds ? piece(rows * p.heads_q * width) : 0};
}

}  // namespace

uint64_t backward_workspace(const Problem& problem, const Geometry& size) {
  const Plan plan = plan_of(problem, size);
  return 2 * plan.per_row + plan.dq;
}

void backward(const Problem& problem, const Device& device, const Run& run) {
  const std::string limit = backward_limit(problem, run.size);
  if (!limit.empty()) throw Error(TEA_UNSUPPORTED, "portable: " + limit);
  const auto stream = static_cast<cudaStream_t>(run.stream);
  const Plan plan = plan_of(problem, run.size);
  BackwardArguments work{make_arguments(problem, run), {}, run.size.batch};
  const AttentionArguments& args = work.args;
  const Choice<Pass>* const fast = choose(args, device);
  char* const memory = static_cast<char*>(args.workspace);
  const bool adds = fast && plan.dq > 0;
  work.sums = {reinterpret_cast<float*>(memory), reinterpret_cast<float*>(memory + plan.per_row),
               adds ? reinterpret_cast<float*>(memory + 2 * plan.per_row) : nullptr, plan.rows,
               plan.width};

  clear_gaps(args, args.queries, {{args.dq, args.heads_q, args.dim_qk}}, false, run.stream);
  clear_gaps(args, args.keys,
             {{args.dk, args.heads_kv, args.dim_qk}, {args.dv, args.heads_kv, args.dim_v}}, false,
             run.stream);
  prepare_rows(work, stream);
  if (fast)
    fast->run(work, stream);
  else
    wide_keys(work, stream);
  if (adds)
    finish_dq(work, stream);
  else if (!queries_alone(work, device, stream))
    wide_queries(work, stream);
  if (args.bias.gradient) wide_bias(work, stream);
  if (args.dsink) sum_dsink(work, stream);
}

}  // namespace tea::portable
