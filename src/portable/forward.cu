// The forward pass on mma.sync, for every valid problem: FlashAttention-2's plan (Dao, 2023) in the
// words of device/.
//
// A block of threads takes one tile of query rows of one head and goes through the keys that its
// rows see in blocks of `cols`, last block first. Shared memory holds the tile of Q, one block of K
// and one of V: V's copy hides behind the scores, the next K's behind softmax and values.
//
//   copies   Q K3 | V3 | K2        | V2 | K1 ...
//   warps         | S3 | O += P3 V3 | S2 | O += P2 V2 ...
//
// A warp has 16 * `tall` rows, and with several `groups` a share of the columns of O. Several
// blocks on a multiprocessor fill each other's gaps.
//
// Few queries: the heads that share keys may lie in the rows of one tile (`pack`), and keys may be
// split among blocks, whose parts merge() adds in a fixed order.
#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <iterator>
#include <string>
#include <utility>

#include "core/error.h"
#include "portable/device/scores.cuh"
#include "portable/forward.h"
#include "portable/gaps.h"

namespace tea::portable {
namespace {

// One row of the table: a shape of tile that fits registers and shared memory.
struct Row {
  int dim, dim_v;   // serves head dimensions up to these, filled up with zeros
  int warps, tall;  // of rows: a tile has 16 * warps * tall of them
  int groups;       // of columns of O
  int cols;         // keys of a block
  int resident;     // blocks on a multiprocessor that the registers must allow
};

// Scores go straight from scale to mask, and everything can be copied 16 bytes at a time.
constexpr Row kPlain[] = {
    // dim  v  warps tall groups cols resident
    {64, 64, 4, 2, 1, 64, 2},   {128, 128, 4, 2, 1, 64, 2}, {192, 128, 4, 1, 1, 64, 2},
    {256, 256, 4, 1, 1, 64, 2}, {512, 512, 2, 1, 2, 32, 1},
};
constexpr Row kGeneral[] = {
    {64, 64, 4, 1, 1, 64, 2},   {128, 128, 4, 1, 1, 64, 2}, {192, 128, 4, 1, 1, 64, 2},
    {256, 256, 4, 1, 1, 64, 1}, {512, 512, 2, 1, 2, 32, 1},
};
constexpr Row kFp32[] = {
    {64, 64, 4, 1, 1, 64, 1},   {128, 128, 4, 1, 1, 32, 1}, {192, 128, 4, 1, 1, 32, 1},
    {256, 256, 2, 1, 2, 32, 1}, {512, 512, 1, 1, 4, 16, 1},
};
constexpr int kRows = static_cast<int>(std::size(kPlain));

// What a kernel computes in; the columns of the table of kernels.
enum Variant { kPlainBf16, kPlainFp16, kAnyBf16, kAnyFp16, kAnyFp8, kAnyFp32, kVariants };

struct Config {
  Row row;
  int dtype;  // of tiles: fp8 lies there as fp16
  bool general, fp8;
};
constexpr Config config(int number) {
  const int row = number / kVariants, variant = number % kVariants;
  if (variant == kPlainBf16) return {kPlain[row], TEA_BF16, false, false};
  if (variant == kPlainFp16) return {kPlain[row], TEA_FP16, false, false};
  if (variant == kAnyBf16) return {kGeneral[row], TEA_BF16, true, false};
  if (variant == kAnyFp16) return {kGeneral[row], TEA_FP16, true, false};
  if (variant == kAnyFp8) return {kGeneral[row], TEA_FP16, true, true};
  return {kFp32[row], TEA_FP32, true, false};
}

// How tiles are numbered: row blocks of one head in sequence, the last one first, since under a
// causal mask it is the longest; splits of the keys of one tile side by side.
struct Tiling {
  int64_t row_blocks, heads;  // heads: of queries, or with pack > 1 of keys
  int rows;                   // of a tile
  int pack;                   // query heads in the rows of one tile
  int splits;                 // of the keys

  struct Tile {
    int64_t number, b, first;  // first: row, or with pack > 1 row * pack + head of the group
    int head, split;           // head: the first query head
  };
  __host__ __device__ Tile at(int64_t block) const {
    const int64_t number = block / splits, rest = number / row_blocks;
    const int64_t row_block = row_blocks - 1 - number % row_blocks;
    return {number, rest / heads, row_block * rows, static_cast<int>(rest % heads) * pack,
            static_cast<int>(block % splits)};
  }
};

// What blocks with a share of the keys leave for merge(): by tile, split and row.
struct Partial {
  float *o, *top, *sum;
};

struct Parameters {
  Work w;
  Tiling tiling;
  Partial partial;
  int64_t first_block;  // of this launch
};

// The query that a row of a tile is.
struct Query {
  int64_t row;
  int head;
};
TEA_DEVICE Query query_of(const Tiling& t, const Tiling::Tile& tile, int local) {
  const int64_t packed = tile.first + local;
  if (t.pack == 1) return {packed, tile.head};
  return {packed / t.pack, tile.head + static_cast<int>(packed % t.pack)};
}

// Rows that a tile of this sequence writes: all of the capacity where padding is there to be
// cleared.
TEA_DEVICE int64_t written_rows(const Work& w, const Item& item) {
  return w.queries.form == TEA_RAGGED ? item.q.length : w.queries.capacity;
}

// LSE, MAX and SUM_EXP of one row. `max` and `total` as in result_of().
TEA_DEVICE void store_per_row(const Work& w, const Item& item, const Query& q,
                              const RowResult& result, float max, float total) {
  const int64_t at = first_per_row(w, item.q, item.b, q.head) + q.row * w.per_row.seq;
  const bool valid = q.row < item.q.length;
  // The largest of scores among which there is a NaN is NaN; fmaxf passes it over.
  const bool spoiled = total != total && max < -kMinusInfinity;
  if (w.per_row.lse) w.per_row.lse[at] = valid ? result.lse : kMinusInfinity;
  if (w.per_row.max) w.per_row.max[at] = valid ? (spoiled ? total : max) : kMinusInfinity;
  if (w.per_row.sum_exp) w.per_row.sum_exp[at] = valid ? result.sum_exp : 0;
}

// By what values are multiplied besides RowResult's factor.
TEA_DEVICE float value_factor(const Work& w, bool fp8) {
  return fp8 ? scalar(w.scales.s_inv) * scalar(w.scales.v_inv) : w.keep_factor;
}
// Padding and rows with nothing to attend are zero, whatever the accumulator holds.
TEA_DEVICE float finished(float o, float factor) { return factor == 0 ? 0.0f : o * factor; }

template <int kNumber>
struct Kernel {
  static constexpr Config C = config(kNumber);
  static constexpr int kDtype = C.dtype, kDim = C.row.dim, kDimV = C.row.dim_v;
  static constexpr int kTall = C.row.tall, kGroups = C.row.groups, kCols = C.row.cols;
  static constexpr int kThreads = 32 * C.row.warps * kGroups;
  static constexpr int kTileRows = 16 * C.row.warps * kTall;
  static constexpr int kOwnV = kDimV / kGroups;  // columns of O that a warp has
  static constexpr int kBytes = kElementBytes<kDtype>;
  static_assert(kDimV <= kDim, "O leaves through the memory of Q");
  static_assert(kTileRows % (kThreads / 8) == 0 || kThreads / 8 > kTileRows);

  using QTile = Tile<kDtype, kDim>;
  using VTile = Tile<kDtype, kDimV>;
  using Scores = float[kTall][kCols / 8][4];
  using Output = float[kTall][kOwnV / 8][4];

  struct Smem {
    alignas(128) uint8_t q[kTileRows * kDim * kBytes];
    alignas(128) uint8_t k[kCols * kDim * kBytes];
    alignas(128) uint8_t v[kCols * kDimV * kBytes];
  };
  static_assert(sizeof(Smem) <= 99 * 1024, "sm_86 and sm_89 have no more for a block");

  // Blocks of keys.
  struct Blocks {
    int begin, end;
  };

  // The band of a plain kernel, in 32 bits and counted from the tile's first row.
  struct Edge {
    int lo, hi, length;
    TEA_DEVICE int begin(int row) const { return lo + row; }
    TEA_DEVICE int end(int row) const { return min(hi + row, length); }
  };

  struct Block {
    const Parameters& p;
    const Work& w;
    const Tiling::Tile tile;
    const Item item;
    const int kv_head;
    const QTile q, k;
    const VTile v;
    const int row, column;  // of the warp: its first row in the tile and column of O

    TEA_DEVICE Block(const Parameters& parameters, Smem& s)
        : p(parameters),
          w(p.w),
          tile(p.tiling.at(p.first_block + blockIdx.x)),
          item(item_of(w, tile.b)),
          kv_head(tile.head / (w.heads_q / w.heads_kv)),
          q{shared_address(s.q)},
          k{shared_address(s.k)},
          v{shared_address(s.v)},
          row(warp() % C.row.warps * 16 * kTall),
          column(warp() / C.row.warps * kOwnV) {}

    TEA_DEVICE Query query(int local) const {
      if constexpr (!C.general) return {tile.first + local, tile.head};
      return query_of(p.tiling, tile, local);
    }
    // Rows of the tile that exist, of all packed heads.
    TEA_DEVICE int valid_rows() const {
      const int64_t rows = item.q.length * (C.general ? p.tiling.pack : 1) - tile.first;
      return static_cast<int>(max(int64_t{0}, min(rows, int64_t{kTileRows})));
    }

    TEA_DEVICE Blocks blocks(int rows) const {
      if (rows == 0) return {0, 0};
      const int64_t begin = visible_columns(item.band, query(0).row, item.kv.length).begin;
      const int64_t end = visible_columns(item.band, query(rows - 1).row, item.kv.length).end;
      if (begin >= end) return {0, 0};
      const Blocks all = {static_cast<int>(begin / kCols),
                          static_cast<int>((end + kCols - 1) / kCols)};
      if constexpr (!C.general) return all;
      const int share = (all.end - all.begin + p.tiling.splits - 1) / p.tiling.splits;
      const int first = all.begin + tile.split * share;
      return {min(first, all.end), min(first + share, all.end)};
    }

    // ------------------------------------------------------------------------------- copies

    // Eight lanes take a row, in pieces of eight elements.
    static constexpr int kStep = kThreads / 8;  // rows
    static TEA_DEVICE int copied_row() { return static_cast<int>(threadIdx.x) / 8; }
    static TEA_DEVICE int copied_column() { return static_cast<int>(threadIdx.x) % 8 * 8; }
    static constexpr int kElement = C.fp8 ? 1 : kBytes;  // of an input

    // Rows `pitch` bytes apart, by asynchronous copies; those outside [first, last) are zero.
    template <int kHeight, class T>
    TEA_DEVICE void copy_rows(const T& to, const char* start, int64_t pitch, int dim, int first,
                              int last) const {
      const char* from = start + copied_row() * pitch + copied_column() * kElement;
#pragma unroll
      for (int r = 0; r < kHeight; r += kStep) {
        const int row_there = r + copied_row();
        const bool there = row_there >= first && row_there < last;
#pragma unroll
        for (int c = 0; c < T::kRowBytes / kBytes; c += 64) {
          const bool valid = there && c + copied_column() < dim;
          copy_eight(to, row_there, c + copied_column(), valid ? from + c * kElement : start,
                     valid);
        }
        from += kStep * pitch;
      }
    }
    // Rows anywhere: address(row) gives the bytes of one. In any alignment, and for fp8 too.
    template <int kHeight, class T, class Address>
    TEA_DEVICE void gather_rows(const T& to, const Rows& rows, int dim, int first, int last,
                                const Address& address) const {
#pragma unroll 1
      for (int r = copied_row(); r < kHeight; r += kStep) {
        const bool there = r >= first && r < last;
        const char* const from = there ? address(r) : static_cast<const char*>(rows.data);
#pragma unroll
        for (int c = 0; c < T::kRowBytes / kBytes; c += 64) {
          const int col = c + copied_column();
          const bool valid = there && col < dim;
          const char* const source = from + (valid ? col * kElement : 0);
          if (!C.fp8 && rows.wide)
            copy_eight(to, r, col, source, valid);
          else
            load_eight(to, r, col, source, rows, valid);
        }
      }
    }

    TEA_DEVICE void load_q(int rows) const {
      const auto* base = static_cast<const char*>(w.q.data);
      const int64_t first = first_element(w.q, w.queries, item.q, item.b, 0);
      if constexpr (C.general) {
        gather_rows<kTileRows>(q, w.q, w.dim_qk, 0, rows, [&](int r) {
          const Query at = query(r);
          return base + (first + at.row * w.q.seq + at.head * w.q.head) * kElement;
        });
      } else {
        const int64_t start = first + tile.first * w.q.seq + tile.head * w.q.head;
        copy_rows<kTileRows>(q, base + start * kElement, w.q.seq * kElement, w.dim_qk, 0, rows);
      }
    }
    // Keys that no row of the sequence attends are zero.
    template <class T>
    TEA_DEVICE void load_keys(const T& to, const Rows& rows, const PageTable& table, int dim,
                              int block) const {
      const auto* base = static_cast<const char*>(rows.data);
      const int64_t key = int64_t{block} * kCols;
      const int first = static_cast<int>(max(item.attended.begin - key, int64_t{0}));
      const int last = static_cast<int>(min(item.attended.end - key, int64_t{kCols}));
      if (C.general && w.keys.form == TEA_PAGED) {
        gather_rows<kCols>(to, rows, dim, first, last, [&](int r) {
          return base + paged_element(w, rows, table, item.b, kv_head, key + r) * kElement;
        });
        return;
      }
      const int64_t start = first_element(rows, w.keys, item.kv, item.b, kv_head) + key * rows.seq;
      if (C.fp8 || (C.general && !rows.wide))
        gather_rows<kCols>(to, rows, dim, first, last,
                           [&](int r) { return base + (start + r * rows.seq) * kElement; });
      else
        copy_rows<kCols>(to, base + start * kElement, rows.seq * kElement, dim, first, last);
    }
    TEA_DEVICE void load_k(int block) const {
      load_keys(k, w.k, w.table_k, w.dim_qk, block);
      commit_copies();
    }
    TEA_DEVICE void load_v(int block) const {
      load_keys(v, w.v, w.table_v, w.dim_v, block);
      commit_copies();
    }

    // ----------------------------------------------------------------------------- products

    TEA_DEVICE void multiply_qk(Scores& s) const {
#pragma unroll
      for (int m = 0; m < kTall; ++m)
#pragma unroll
        for (int n = 0; n < kCols / 8; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) s[m][n][i] = 0;
#pragma unroll
      for (int d = 0; d < kDim; d += 16) {
        Left<kDtype> a[kTall];
#pragma unroll
        for (int m = 0; m < kTall; ++m) a[m] = load_left(q, row + 16 * m, d);
#pragma unroll
        for (int n = 0; n < kCols / 16; ++n) {
          const Right<kDtype> b = load_right(k, 16 * n, d);
#pragma unroll
          for (int m = 0; m < kTall; ++m) multiply(s[m][2 * n], s[m][2 * n + 1], a[m], b);
        }
      }
    }
    TEA_DEVICE void multiply_pv(Output& o, const Scores& s) const {
#pragma unroll
      for (int c = 0; c < kCols / 16; ++c) {
        Left<kDtype> a[kTall];
#pragma unroll
        for (int m = 0; m < kTall; ++m) a[m] = as_left<kDtype>(s[m][2 * c], s[m][2 * c + 1]);
#pragma unroll
        for (int n = 0; n < kOwnV / 16; ++n) {
          const Right<kDtype> b = load_right_transposed(v, column + 16 * n, 16 * c);
#pragma unroll
          for (int m = 0; m < kTall; ++m) multiply(o[m][2 * n], o[m][2 * n + 1], a[m], b);
        }
      }
    }
    static TEA_DEVICE void shrink_rows(float (&o)[kOwnV / 8][4], const float (&shrink)[2]) {
#pragma unroll
      for (int n = 0; n < kOwnV / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) o[n][i] *= shrink[half_of(i)];
    }

    // ------------------------------------------------------------------------------- scores

    TEA_DEVICE Edge edge() const {
      const auto near = [](int64_t x) {
        return static_cast<int>(min(max(x, int64_t{-1} << 30), int64_t{1} << 30));
      };
      return {near(tile.first + item.band.lo), near(tile.first + item.band.hi + 1),
              near(item.kv.length)};
    }
    // Plain: only where some row of the warp does not see all of the block.
    TEA_DEVICE void mask(Scores& s, const Edge& e, int block) const {
      const int key = block * kCols;
      if (key >= e.begin(row + 16 * kTall - 1) && key + kCols <= e.end(row)) return;
#pragma unroll
      for (int m = 0; m < kTall; ++m) {
        Window window[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int local = row + 16 * m + row_of(2 * r);
          window[r] = {e.begin(local) - key, e.end(local) - key};
        }
#pragma unroll
        for (int n = 0; n < kCols / 8; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i)
            if (!window[half_of(i)].holds(column_of(n, i))) s[m][n][i] = kMinusInfinity;
      }
    }
    TEA_DEVICE void transform_all(Scores& s, const Scaling& scaling, int block) const {
      const int64_t key = int64_t{block} * kCols;
#pragma unroll
      for (int m = 0; m < kTall; ++m) {
        RowTerms terms[2];
        Window window[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const Query at = query(row + 16 * m + row_of(2 * r));
          terms[r] = terms_of(w, item, min(at.head, w.heads_q - 1), at.row);
          window[r] = window_of(item, at.row, key, kCols);
        }
        transform(s[m], w, item, scaling, terms, window, key);
      }
    }
    TEA_DEVICE void drop_all(Scores& s, const Dropping& d, int block) const {
      const int64_t key = int64_t{block} * kCols + item.origin_col;
#pragma unroll
      for (int m = 0; m < kTall; ++m)
        drop(s[m], d, tile.first + row + 16 * m + item.origin_row, key,
             C.fp8 ? w.keep_factor : 1.0f);
    }
    // P as it is in fp8; the codes' values are exact in fp16. Returns the largest before the scale.
    TEA_DEVICE float cast_all(Scores& s, float scale) const {
      float largest = 0;
#pragma unroll
      for (int m = 0; m < kTall; ++m)
#pragma unroll
        for (int n = 0; n < kCols / 8; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            largest = fmaxf(largest, s[m][n][i]);
            s[m][n][i] = cast_fp8(s[m][n][i] * scale, w.q.dtype);
          }
      return largest;
    }

    TEA_DEVICE Scaling scaling() const {
      return {C.fp8 ? scalar(w.scales.q_inv) * scalar(w.scales.k_inv) : 1.0f, w.scale};
    }

    // Fills o with the sum of values, weighted by exp(score - top). fp8 casts P relative to the
    // row's maximum, which it finds in a pass of its own. Returns the largest P before its cast.
    TEA_DEVICE float attend(Output& o, OnlineSoftmax (&softmax)[kTall], Blocks b) const {
      const float scale_log2 = C.general ? kLog2E : w.scale * kLog2E;
      const Edge e = edge();
      Dropping dropping = {};
      float s_scale = 1, largest = 0;
      if (C.general && w.rng) dropping = dropping_of(w, item.b, tile.head);
      if (C.fp8) s_scale = scalar(w.scales.s);
      for (int pass = C.fp8 ? 0 : 1; pass < 2; ++pass) {
        load_k(b.end - 1);
        for (int block = b.end - 1; block >= b.begin; --block) {
          wait_copies<0>();
          __syncthreads();  // K is there, and every warp has read V
          if (pass == 1) load_v(block);
          Scores s;
          multiply_qk(s);
          if constexpr (C.general)
            transform_all(s, scaling(), block);
          else
            mask(s, e, block);
          wait_copies<0>();
          __syncthreads();  // V is there, and every warp has read K
          if (block > b.begin) load_k(block - 1);
#pragma unroll
          for (int m = 0; m < kTall; ++m) {
            if (pass == 0) {
              softmax[m].raise_top(s[m]);
              continue;
            }
            float shrink[2];
            softmax[m].update(s[m], scale_log2, shrink);
            shrink_rows(o[m], shrink);
          }
          if (pass == 0) continue;
          if (C.general && w.rng) drop_all(s, dropping, block);
          if constexpr (C.fp8) largest = fmaxf(largest, cast_all(s, s_scale));
          multiply_pv(o, s);
        }
      }
      return largest;
    }

    // ------------------------------------------------------------------------------- output

    struct Factors {
      float of[kTall][2];
    };

    // What each row's sums amount to; leaves the factors of O behind.
    TEA_DEVICE Factors finish_rows(const OnlineSoftmax (&softmax)[kTall]) const {
      Factors out;
      const float more = value_factor(w, C.fp8);
#pragma unroll
      for (int m = 0; m < kTall; ++m)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const Query at = query(row + 16 * m + row_of(2 * r));
          const float max = softmax[m].top[r] * (C.general ? 1.0f : w.scale);
          const float total = quad_sum(softmax[m].sum[r]);
          const bool valid = at.row < item.q.length;
          const RowResult result = result_of(max, total, valid ? sink_of(w, at.head) : 0.0f);
          out.of[m][r] = valid ? result.factor * more : 0.0f;
          if (lane() % 4 == 0 && column == 0 && at.row < written_rows(w, item))
            store_per_row(w, item, at, result, max, total);
        }
      return out;
    }

    // Through Q's memory, so that rows leave in pieces of 16 bytes.
    TEA_DEVICE void store_staged(const Output& o, const Factors& factors) const {
      const VTile to = {q.address};
      __syncthreads();  // every warp has read Q
#pragma unroll
      for (int m = 0; m < kTall; ++m)
#pragma unroll
        for (int n = 0; n < kOwnV / 8; ++n)
#pragma unroll
          for (int r = 0; r < 2; ++r)
            store_shared_4(to.at(row + 16 * m + row_of(2 * r), column + column_of(n, 0)),
                           pack<kDtype>(finished(o[m][n][2 * r], factors.of[m][r]),
                                        finished(o[m][n][2 * r + 1], factors.of[m][r])));
      __syncwarp();
      constexpr int kPieces = kOwnV / 8;
      auto* const data = static_cast<uint16_t*>(w.o.data);
      const int64_t first = first_element(w.o, w.queries, item.q, item.b, 0);
#pragma unroll 4
      for (int i = lane(); i < 16 * kTall * kPieces; i += 32) {
        const int local = row + i / kPieces, col = column + i % kPieces * 8;
        const Query at = query(local);
        if (at.row < written_rows(w, item) && col < w.dim_v)
          *reinterpret_cast<uint4*>(data + first + at.row * w.o.seq + at.head * w.o.head + col) =
              load_shared_16(to.at(local, col));
      }
    }
    // In any type and alignment.
    TEA_DEVICE void store_direct(const Output& o, const Factors& factors) const {
      const float scale = C.fp8 ? scalar(w.scales.o) : 1.0f;
      const int64_t first = first_element(w.o, w.queries, item.q, item.b, 0);
#pragma unroll
      for (int m = 0; m < kTall; ++m)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const Query at = query(row + 16 * m + row_of(2 * r));
          if (at.row >= written_rows(w, item)) continue;
          const int64_t start = first + at.row * w.o.seq + at.head * w.o.head + column;
#pragma unroll
          for (int n = 0; n < kOwnV / 8; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i)
              if (column + 8 * n < w.dim_v)
                store_float(w.o.data, w.o.dtype, start + column_of(n, i),
                            finished(o[m][n][2 * r + i], factors.of[m][r]) * scale);
        }
    }
    TEA_DEVICE void record_amaxes(const Output& o, const Factors& factors, float s_largest) const {
      float largest = 0;
#pragma unroll
      for (int m = 0; m < kTall; ++m)
#pragma unroll
        for (int n = 0; n < kOwnV / 8; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i)
            largest = fmaxf(largest, fabsf(finished(o[m][n][i], factors.of[m][half_of(i)])));
      for (int step = 16; step; step /= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, step));
        s_largest = fmaxf(s_largest, __shfl_xor_sync(0xffffffff, s_largest, step));
      }
      if (lane() == 0) {
        raise(w.scales.o_amax, largest);
        raise(w.scales.s_amax, s_largest);
      }
    }
    TEA_DEVICE void store_partial(const Output& o, const OnlineSoftmax (&softmax)[kTall],
                                  int rows) const {
      const int64_t first = (tile.number * p.tiling.splits + tile.split) * kTileRows;
#pragma unroll
      for (int m = 0; m < kTall; ++m)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int local = row + 16 * m + row_of(2 * r);
          const float total = quad_sum(softmax[m].sum[r]);
          if (local >= rows) continue;
          if (lane() % 4 == 0 && column == 0) {
            p.partial.top[first + local] = softmax[m].top[r];
            p.partial.sum[first + local] = total;
          }
          float* const to = p.partial.o + (first + local) * w.dim_v + column;
#pragma unroll
          for (int n = 0; n < kOwnV / 8; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i)
              if (column + 8 * n < w.dim_v) to[column_of(n, i)] = o[m][n][2 * r + i];
        }
    }

    TEA_DEVICE void run() const {
      Output o = {};
      OnlineSoftmax softmax[kTall];
#pragma unroll
      for (int m = 0; m < kTall; ++m) softmax[m].start();
      const int rows = valid_rows();
      const Blocks b = blocks(rows);
      float s_largest = 0;
      if (b.begin < b.end) {
        load_q(rows);
        s_largest = attend(o, softmax, b);
      }
      if (C.general && p.tiling.splits > 1) return store_partial(o, softmax, rows);
      const Factors factors = finish_rows(softmax);
      if constexpr (C.fp8) record_amaxes(o, factors, s_largest);
      if constexpr (C.general)
        if (kDtype == TEA_FP32 || C.fp8 || !w.o.wide) return store_direct(o, factors);
      if constexpr (kDtype != TEA_FP32) store_staged(o, factors);
    }
  };
};

// Named by a number, not by a Config: see src/hopper/forward.cu.
template <int kNumber>
__global__ void __launch_bounds__(Kernel<kNumber>::kThreads, Kernel<kNumber>::C.row.resident)
    forward_entry(const __grid_constant__ Parameters p) {
  extern __shared__ __align__(128) uint8_t memory[];
  using K = Kernel<kNumber>;
  typename K::Block(p, *reinterpret_cast<typename K::Smem*>(memory)).run();
}

// ----------------------------------------------------------------------------------------- merge

// A warp adds the parts of one row, first split first.
constexpr int kMergeWarps = 4, kMostColumns = 512;

__global__ void __launch_bounds__(32 * kMergeWarps)
    merge_entry(const __grid_constant__ Parameters p) {
  const Tiling& t = p.tiling;
  const int blocks_per_tile = t.rows / kMergeWarps;
  const int64_t block = p.first_block + blockIdx.x;
  const Tiling::Tile tile = t.at(block / blocks_per_tile * t.splits);
  const int local = static_cast<int>(block % blocks_per_tile) * kMergeWarps + warp();
  const Item item = item_of(p.w, tile.b);
  const Query at = query_of(t, tile, local);
  if (at.row >= written_rows(p.w, item)) return;

  const bool valid = at.row < item.q.length;
  const int64_t first = tile.number * t.splits * t.rows + local;
  float max = kMinusInfinity, total = 0, o[kMostColumns / 32] = {};
  for (int s = 0; valid && s < t.splits; ++s) max = fmaxf(max, p.partial.top[first + s * t.rows]);
  for (int s = 0; valid && s < t.splits; ++s) {
    const int64_t part = first + s * t.rows;
    const float top = p.partial.top[part];
    const float weight = top == kMinusInfinity ? 1.0f : exp2_fast((top - max) * kLog2E);
    total += p.partial.sum[part] * weight;
#pragma unroll
    for (int i = 0; i < kMostColumns / 32; ++i)
      if (lane() + 32 * i < p.w.dim_v)
        o[i] += p.partial.o[part * p.w.dim_v + lane() + 32 * i] * weight;
  }
  const RowResult result = result_of(max, total, valid ? sink_of(p.w, at.head) : 0.0f);
  const float factor = valid ? result.factor * value_factor(p.w, false) : 0.0f;
  if (lane() == 0) store_per_row(p.w, item, at, result, max, total);
  const int64_t to =
      first_element(p.w.o, p.w.queries, item.q, item.b, at.head) + at.row * p.w.o.seq;
#pragma unroll
  for (int i = 0; i < kMostColumns / 32; ++i)
    if (lane() + 32 * i < p.w.dim_v)
      store_float(p.w.o.data, p.w.o.dtype, to + lane() + 32 * i, finished(o[i], factor));
}

// ---------------------------------------------------------------------------------------- launch

// A few blocks for each multiprocessor of a large GPU; the same everywhere, so that results are.
constexpr int64_t kEnough = 128, kWanted = 256;
constexpr int64_t kLeastBlocks = 8;  // of keys in a split: below, the merge costs more than it wins

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

int table_row(const Problem& p) {
  const auto serves = [&](const Row& r) { return p.dim_qk <= r.dim && p.v_dim() <= r.dim_v; };
  return static_cast<int>(std::find_if(std::begin(kPlain), std::end(kPlain), serves) - kPlain);
}

Variant general_variant(const Problem& p) {
  if (p.is_fp8()) return kAnyFp8;
  if (p.dtype == TEA_FP32) return kAnyFp32;
  return p.dtype == TEA_BF16 ? kAnyBf16 : kAnyFp16;
}

// How the problem is cut where a general kernel serves it. fp8 needs a row's maximum over all keys,
// and dropout wants the rows of one head.
Tiling few_queries(const Problem& p, const Geometry& size) {
  const Row row = config(table_row(p) * kVariants + general_variant(p)).row;
  const int rows = 16 * row.warps * row.tall, group = p.heads_q / p.heads_kv;
  const int64_t max_q = p.q_form == TEA_RAGGED ? std::min(size.max_q, size.tokens_q) : size.max_q;
  Tiling t{0, p.heads_q, rows, 1, 1};
  if (group > 1 && 2 * max_q <= rows && !p.drops()) t.pack = group, t.heads = p.heads_kv;
  t.row_blocks = ceil_div(max_q * t.pack, rows);
  const int64_t tiles = size.batch * t.heads * t.row_blocks;
  const int64_t keys = ceil_div(size.max_kv, row.cols);
  if (!p.is_fp8() && tiles > 0 && tiles < kEnough)
    t.splits = static_cast<int>(
        std::max<int64_t>(1, std::min(ceil_div(kWanted, tiles), keys / kLeastBlocks)));
  return t;
}

bool is_plain(const Problem& p, const Work& w) {
  return (p.dtype == TEA_BF16 || p.dtype == TEA_FP16) && p.kv_form != TEA_PAGED &&
         has_plain_scores(w) && w.scale > 0 && w.q.wide && w.k.wide && w.v.wide && w.o.wide &&
         w.queries.capacity < int64_t{1} << 30 && w.keys.capacity < int64_t{1} << 30;
}

int64_t partial_rows(const Tiling& t, int64_t batch) {
  return t.splits == 1 ? 0 : batch * t.heads * t.row_blocks * t.splits * t.rows;
}

void require(cudaError_t code, const char* what) {
  if (code != cudaSuccess)
    throw Error(TEA_FAILED, std::string(what) + ": " + cudaGetErrorString(code));
}

// Grids are at most this long; a larger problem takes several launches.
constexpr int64_t kLongest = int64_t{1} << 30;

template <class Kernel>
void launch_all(Kernel* kernel, Parameters& p, int64_t blocks, int threads, size_t shared,
                cudaStream_t stream) {
  for (p.first_block = 0; p.first_block < blocks; p.first_block += kLongest) {
    const auto grid = static_cast<unsigned>(std::min(kLongest, blocks - p.first_block));
    kernel<<<grid, threads, shared, stream>>>(p);
    require(cudaGetLastError(), "launching the forward pass");
  }
}

// Once for each device: more shared memory than a kernel has by default.
template <int kNumber>
void prepare() {
  static std::atomic<uint64_t> done{0};
  int device = 0;
  require(cudaGetDevice(&device), "cudaGetDevice");
  const uint64_t bit = uint64_t{1} << (device & 63);
  if (device < 64 && done.load(std::memory_order_relaxed) & bit) return;
  const auto kernel = forward_entry<kNumber>;
  constexpr int kShared = sizeof(typename Kernel<kNumber>::Smem);
  require(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared),
          "cudaFuncSetAttribute");
  require(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                               cudaSharedmemCarveoutMaxShared),
          "cudaFuncSetAttribute");
  done.fetch_or(bit, std::memory_order_relaxed);
}

template <int kNumber>
void launch(Parameters& p, int64_t blocks, cudaStream_t stream) {
  prepare<kNumber>();
  using K = Kernel<kNumber>;
  launch_all(forward_entry<kNumber>, p, blocks, K::kThreads, sizeof(typename K::Smem), stream);
}

using Launch = void (*)(Parameters&, int64_t, cudaStream_t);
template <int... kNumber>
constexpr std::array<Launch, sizeof...(kNumber)> launchers(std::integer_sequence<int, kNumber...>) {
  return {launch<kNumber>...};
}
constexpr auto kLaunch = launchers(std::make_integer_sequence<int, kRows * kVariants>());

}  // namespace

uint64_t forward_workspace(const Problem& problem, const Geometry& size) {
  const int64_t rows = partial_rows(few_queries(problem, size), size.batch);
  return static_cast<uint64_t>(rows * (problem.v_dim() + 2)) * sizeof(float);
}

void forward(const Problem& problem, const Run& run) {
  const auto stream = static_cast<cudaStream_t>(run.stream);
  Parameters p{make_work(problem, run), few_queries(problem, run.size), {}, 0};
  clear_gaps(p.w, p.w.queries, {{p.w.o, p.w.heads_q, p.w.dim_v}}, true, stream);
  Tiling& t = p.tiling;
  int number = table_row(problem) * kVariants + general_variant(problem);
  if (t.pack == 1 && t.splits == 1 && is_plain(problem, p.w)) {
    number = table_row(problem) * kVariants + (problem.dtype == TEA_BF16 ? kPlainBf16 : kPlainFp16);
    const Row row = config(number).row;
    const int64_t rows = t.row_blocks * t.rows;
    t.rows = 16 * row.warps * row.tall;
    t.row_blocks = ceil_div(rows, t.rows);
  }
  const int64_t tiles = p.w.batch * t.heads * t.row_blocks;
  if (tiles == 0) return;
  auto* const memory = static_cast<float*>(p.w.workspace);
  const int64_t rows = partial_rows(t, p.w.batch);
  p.partial = {memory, memory + rows * p.w.dim_v, memory + rows * (p.w.dim_v + 1)};
  kLaunch[static_cast<size_t>(number)](p, tiles * t.splits, stream);
  if (t.splits > 1)
    launch_all(merge_entry, p, tiles * t.rows / kMergeWarps, 32 * kMergeWarps, 0, stream);
}

}  // namespace tea::portable
