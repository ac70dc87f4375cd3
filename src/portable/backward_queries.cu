// dQ without atomics, where equal inputs must give equal bits: a warp keeps its query rows and the
// sums of their gradient in registers, and the block walks over the keys that they see.
//
//   load K', V' | S = Q K^T | dP = dO V^T | dS = exp(S - LSE) (dP - delta) | dQ += dS K
//
// dS goes from accumulators to operand without leaving the registers, so that the copies of keys
// are all that warps wait for. With this, the pass of backward.cu leaves dQ out; together they
// multiply 7/5 as much as that pass alone.
#include <cstddef>

#include "portable/backward_launch.cuh"
#include "portable/device/gradient.cuh"

namespace tea::portable {
namespace {

// One row of the table: a shape of tile that fits the registers and the shared memory.
struct Row {
  bool general;    // as in backward.cu
  int dim;         // both head dimensions are at most this
  int rows, cols;  // of a tile: queries and keys
  int tall;        // a warp has 16 * tall rows
};
// The first row that fits serves. Two strips of rows for each warp, so that an operand of the keys
// serves both, as far as registers hold them. Tiles up to 128 fit 99 KB (sm_86, sm_89, sm_120).
constexpr Row kTable[] = {
    // general dim rows cols tall
    {false, 64, 128, 64, 2}, {false, 128, 128, 32, 2}, {false, 256, 128, 32, 1},
    {true, 64, 128, 64, 1},  {true, 128, 64, 64, 1},   {true, 256, 64, 32, 1},
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
  unsigned tiles;  // of the rows of a sequence
  float scale_log2;
};

template <Config C>
struct Kernel {
  static constexpr int kDtype = C.dtype, kDim = C.row.dim, kRows = C.row.rows, kCols = C.row.cols;
  static constexpr int kTall = C.row.tall, kOwnRows = 16 * kTall, kThreads = 32 * kRows / kOwnRows;
  static constexpr int kTiles = kCols / 8;
  static constexpr bool kGeneral = C.row.general;
  using Operand = Tile<kDtype, kDim>;
  using Scores = float[kTall][kTiles][4];

  struct Smem {
    alignas(128) uint8_t q[kRows * kDim * 2];
    alignas(128) uint8_t dout[kRows * kDim * 2];
    alignas(128) uint8_t k[2][kCols * kDim * 2];
    alignas(128) uint8_t v[2][kCols * kDim * 2];
  };
  static_assert(sizeof(Smem) <= 227 * 1024, "the shared-memory plan does not fit");

  const Parameters& p;
  const AttentionArguments& args;
  Smem& s;
  const SequencePair& seq;
  const int head, kv_head, first;
  const Factors f;
  Columns rows;  // of the tile that see anything
  float lse2[kTall][2], delta[kTall][2];
  float dq[kTall][kDim / 8][4];

  TEA_DEVICE Kernel(const Parameters& from, Smem& smem, const SequencePair& of, int h, int row)
      : p(from),
        args(from.work.args),
        s(smem),
        seq(of),
        head(h),
        kv_head(h / (args.heads_q / args.heads_kv)),
        first(row),
        f(factors_of<!kGeneral>(args)),
        rows(seeing_rows(of)),
        dq{} {
    rows = {max(rows.begin, int64_t{first}), min(rows.end, int64_t{first} + kRows)};
    const int64_t entry = first_entry(p.work, seq, head);
#pragma unroll
    for (int m = 0; m < kTall; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int i = own_row(m) + row_of(2 * r);
        const bool any = i >= rows.begin && i < rows.end;
        lse2[m][r] = any ? p.work.sums.lse2[entry + i] : 0.0f;
        delta[m][r] = any ? p.work.sums.delta[entry + i] : 0.0f;
      }
  }
  // The first of the warp's rows, or of 16 of them.
  TEA_DEVICE int own_row(int m = 0) const { return first + kOwnRows * warp() + 16 * m; }

  // ---------------------------------------------------------------------------------- copies

  TEA_DEVICE void load_queries(uint8_t* to, const StridedTensor& from, int dim) const {
    load_rows<kGeneral, kRows, kThreads>(Operand{shared_address(to)}, from,
                                         first_element(from, args.queries, seq.q, seq.batch, head),
                                         first, rows, 0, dim);
  }
  TEA_DEVICE void load_keys(uint8_t* to, const StridedTensor& from, int dim, int key) const {
    load_rows<kGeneral, kCols, kThreads>(Operand{shared_address(to)}, from,
                                         first_element(from, args.keys, seq.kv, seq.batch, kv_head),
                                         key, seq.attended, 0, dim);
  }
  TEA_DEVICE void load_step(int key, int stage) const {
    load_keys(s.k[stage], args.k, args.dim_qk, key);
    load_keys(s.v[stage], args.v, args.dim_v, key);
    commit_copies();
  }

  // ---------------------------------------------------------------------------------- scores

  // Whether the warp's rows see any, or all, of the keys from `key` on.
  TEA_DEVICE bool sees_any(int key) const {
    const int row = own_row();
    return key <= row + kOwnRows - 1 + seq.band.hi && key + kCols - 1 >= row + seq.band.lo;
  }
  TEA_DEVICE bool sees_all(int key) const {
    const int row = own_row(), last = row + kOwnRows - 1;
    return row >= rows.begin && last < rows.end && key + kCols <= seq.kv.length &&
           key + kCols - 1 <= row + seq.band.hi && key >= last + seq.band.lo;
  }

  TEA_DEVICE void multiply_scores(Scores& x, const uint8_t* queries, const uint8_t* keys) const {
    multiply_tiles<kDtype, kDim / 16, Summed::kAlongRows, Summed::kAlongRows>(
        x, Operand{shared_address(queries)}, kOwnRows * warp(), Operand{shared_address(keys)}, 0);
  }
  // x: dS as an operand.
  TEA_DEVICE void plain_scores(Scores& x, int key, int stage) const {
    Scores dp = {};
    multiply_scores(x, s.q, s.k[stage]);
    multiply_scores(dp, s.dout, s.v[stage]);
    const bool all = sees_all(key);
#pragma unroll
    for (int m = 0; m < kTall; ++m) {
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          x[m][n][i] = probability(x[m][n][i], p.scale_log2, lse2[m][row_slot(i)]) *
                       (dp[m][n][i] - delta[m][row_slot(i)]);
      if (!all) hide(x[m], own_row(m), key);
    }
  }
  TEA_DEVICE void hide(float (&x)[kTiles][4], int row, int key) const {
    Window window[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) window[r] = window_of(seq, row + row_of(2 * r), key, kCols);
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (!window[row_slot(i)].holds(column_of(n, i))) x[n][i] = 0;
  }
  TEA_DEVICE void general_scores(Scores& x, int key, int stage, const Head& rules) const {
    float largest = 0;  // the other pass records it
    float bend[kTall][kTiles][4];
    const auto strip = [&](int m) { return Strip<kTiles>{args, seq, rules, own_row(m), key}; };
    multiply_scores(x, s.q, s.k[stage]);
#pragma unroll
    for (int m = 0; m < kTall; ++m) {
      strip(m).weigh(x[m], bend[m], f.scores, lse2[m]);
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) x[m][n][i] *= fmaxf(bend[m][n][i], 0.0f);
    }
    Scores dp = {};
    multiply_scores(dp, s.dout, s.v[stage]);
#pragma unroll
    for (int m = 0; m < kTall; ++m) {
      strip(m).slope(x[m], dp[m], f.dprob, delta[m]);
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) x[m][n][i] = strip(m).slope_operand(x[m][n][i], f, &largest);
    }
  }
  TEA_DEVICE void add(const Scores& x, int stage) {
    const Operand keys{shared_address(s.k[stage])};
    const int l = afresh_thread(lane());
#pragma unroll
    for (int step = 0; step < kCols / 16; ++step) {
      Left<kDtype> left[kTall];
#pragma unroll
      for (int m = 0; m < kTall; ++m) left[m] = as_left<kDtype>(x[m][2 * step], x[m][2 * step + 1]);
#pragma unroll
      for (int n = 0; n < kDim / 16; ++n) {
        const Right<kDtype> right = load_right_transposed(keys, 16 * n, 16 * step, l);
#pragma unroll
        for (int m = 0; m < kTall; ++m)
          multiply<kDtype>(dq[m][2 * n], dq[m][2 * n + 1], left[m], right);
      }
    }
  }

  TEA_DEVICE void walk() {
    if (rows.begin >= rows.end) return;
    const Columns keys = seen_keys(seq, rows.begin, rows.end);
    const int begin = static_cast<int>(keys.begin) / kCols * kCols;
    const int end = static_cast<int>(keys.end);
    if (begin >= end) return;
    const Head rules = kGeneral ? head_of(args, seq, head) : Head{};
    load_queries(s.q, args.q, args.dim_qk);
    load_queries(s.dout, args.dout, args.dim_v);
    load_step(begin, 0);
    int stage = 0;
    for (int key = begin; key < end; key += kCols, stage ^= 1) {
      wait_copies<0>();
      __syncthreads();  // the keys are there, and every warp has read those before
      if (key + kCols < end) load_step(key + kCols, stage ^ 1);
      if (!sees_any(key)) continue;
      Scores x = {};
      if constexpr (kGeneral)
        general_scores(x, key, stage, rules);
      else
        plain_scores(x, key, stage);
      add(x, stage);
    }
  }

  // ---------------------------------------------------------------------------------- output

  // Rows of the tile as far as the tensor has them; those that see nothing as zeros.
  TEA_DEVICE void store() const {
    const int64_t count = args.queries.form == TEA_RAGGED ? seq.q.length : args.queries.max_seqlen;
    const Result to = {args.dq,
                       first_element(args.dq, args.queries, seq.q, seq.batch, head),
                       0,
                       args.dim_qk,
                       f.dq,
                       scalar(args.fp8.dq),
                       args.fp8.dq_amax};
    __syncthreads();  // every warp has read Q and dO
    if constexpr (kGeneral)
      store_general(to, count);
    else
      store_plain(to, count);
  }
  // Through the memory of Q and dO together as fp32.
  TEA_DEVICE void store_general(const Result& to, int64_t count) const {
    static_assert(offsetof(Smem, dout) == sizeof s.q);
    float(*const sums)[kDim] = reinterpret_cast<float(*)[kDim]>(s.q);
#pragma unroll
    for (int m = 0; m < kTall; ++m)
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          sums[own_row(m) - first + row_of(i)][column_of(n, i)] = dq[m][n][i];
    __syncthreads();
    store_sums<kRows, kDim, kThreads>(sums, to, first, count, rows);
  }
  // Through the memory of Q, so that rows leave in pieces of 16 bytes.
  TEA_DEVICE void store_plain(const Result& to, int64_t count) const {
    const Operand tile{shared_address(s.q)};
#pragma unroll
    for (int m = 0; m < kTall; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = own_row(m) + row_of(2 * r);
        const bool any = row >= rows.begin && row < rows.end;
#pragma unroll
        for (int n = 0; n < kDim / 8; ++n)
          store_two(tile, row - first, column_of(n, 0), any ? dq[m][n][2 * r] * to.factor : 0.0f,
                    any ? dq[m][n][2 * r + 1] * to.factor : 0.0f);
      }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kRows * Operand::kPieces / kThreads; ++i) {
      const int n = i * kThreads + static_cast<int>(threadIdx.x);
      const int row = n / Operand::kPieces, column = n % Operand::kPieces * 8;
      if (first + row >= count || column >= to.dim) continue;
      *reinterpret_cast<uint4*>(static_cast<uint16_t*>(to.rows.data) + to.head_element +
                                (first + row) * to.rows.seq + column) =
          load_shared_16(tile.piece(row, column / 8));
    }
  }

  static TEA_DEVICE void body(const Parameters& p) {
    extern __shared__ __align__(128) uint8_t memory[];
    const unsigned n = blockIdx.x, heads = static_cast<unsigned>(p.work.args.heads_q);
    // The last tile first: under a causal mask it is the longest.
    const int tile = static_cast<int>(p.tiles - 1 - n % p.tiles);
    const SequencePair seq = sequence_pair_of(p.work.args, n / p.tiles / heads);
    Kernel kernel(p, *reinterpret_cast<Smem*>(memory), seq, static_cast<int>(n / p.tiles % heads),
                  tile * kRows);
    kernel.walk();
    kernel.store();
  }
};

struct Pass {
  static constexpr const auto& table = kTable;
  static constexpr const char* name = "backward, dQ alone";
  using Parameters = portable::Parameters;
  template <int kNumber>
  using Kernel = portable::Kernel<config(kNumber)>;
  template <class K>
  static int64_t tiles(const AttentionArguments& args) {
    return (args.queries.max_seqlen + K::kRows - 1) / K::kRows;
  }
  static int64_t heads(const AttentionArguments& args) { return args.heads_q; }
};

}  // namespace

bool queries_alone(const BackwardArguments& work, const Device& device, cudaStream_t stream) {
  const AttentionArguments& args = work.args;
  const bool general = !is_plain(args, {&args.q, &args.k, &args.v, &args.dout, &args.dq});
  const Choice<Pass>* const found =
      choose<Pass>(args, device, [&](const Row& row) { return row.general == general; });
  if (found) found->run(work, stream);
  return found;
}

}  // namespace tea::portable
