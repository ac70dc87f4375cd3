// The kernel of the forward pass on mma.sync: FlashAttention-2's plan (Dao, 2023) in the
// words beside it.
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
// split among blocks, whose parts merge_entry adds in a fixed order.
#pragma once
#include <cuda_runtime.h>

#include <algorithm>

#include "math/formats.h"
#include "portable/device/forward_rows.cuh"

namespace tea::portable {

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
    const AttentionArguments& args;
    const Tiling::Tile tile;
    const SequencePair seq;
    const int kv_head;
    const QTile q, k;
    const VTile v;
    const int row, column;  // of the warp: its first row in the tile and column of O

    TEA_DEVICE Block(const Parameters& parameters, Smem& s)
        : p(parameters),
          args(p.args),
          tile(p.tiling.at(p.first_block + blockIdx.x)),
          seq(sequence_pair_of(args, tile.b)),
          kv_head(tile.head / p.group),
          q{shared_address(s.q)},
          k{shared_address(s.k)},
          v{shared_address(s.v)},
          row(warp() % C.row.warps * 16 * kTall),
          column(kGroups == 1 ? 0 : warp() / C.row.warps * kOwnV) {}

    TEA_DEVICE Query query(int local) const {
      if constexpr (!C.general) return {tile.first + local, tile.head};
      return query_of(p.tiling, tile, local);
    }
    // Rows of the tile that exist, of all packed heads.
    TEA_DEVICE int valid_rows() const {
      const int64_t rows = seq.q.length * (C.general ? p.tiling.pack : 1) - tile.first;
      return static_cast<int>(max(int64_t{0}, min(rows, int64_t{kTileRows})));
    }

    TEA_DEVICE Blocks blocks(int rows) const {
      if (rows == 0) return {0, 0};
      const int64_t begin = visible_columns(seq.band, query(0).row, seq.kv.length).begin;
      const int64_t end = visible_columns(seq.band, query(rows - 1).row, seq.kv.length).end;
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
          copy_eight(to, row_there, c + copied_column(), from + c * kElement,
                     there && c + copied_column() < dim);
        }
        from += kStep * pitch;
      }
    }
    // Rows anywhere: address(row) gives the bytes of one. In any alignment, and for fp8 too.
    template <int kHeight, class T, class Address>
    TEA_DEVICE void gather_rows(const T& to, const StridedTensor& rows, int dim, int first,
                                int last, const Address& address) const {
#pragma unroll 1
      for (int r = copied_row(); r < kHeight; r += kStep) {
        const bool there = r >= first && r < last;
        const char* const from = there ? address(r) : static_cast<const char*>(rows.data);
#pragma unroll
        for (int c = 0; c < T::kRowBytes / kBytes; c += 64) {
          const int col = c + copied_column();
          const bool valid = there && col < dim;
          const char* const source = from + (valid ? col * kElement : 0);
          if (!C.fp8 && rows.is_vectorizable)
            copy_eight(to, r, col, source, valid);
          else
            load_eight(to, r, col, source, rows, valid);
        }
      }
    }

    TEA_DEVICE void load_q(int rows) const {
      const auto* base = static_cast<const char*>(args.q.data);
      const int64_t first = first_element(args.q, args.queries, seq.q, seq.batch, 0);
      if constexpr (C.general) {
        gather_rows<kTileRows>(q, args.q, args.dim_qk, 0, rows, [&](int r) {
          const Query at = query(r);
          return base + (first + at.row * args.q.seq + at.head * args.q.head) * kElement;
        });
      } else {
        const int64_t start = first + tile.first * args.q.seq + tile.head * args.q.head;
        copy_rows<kTileRows>(q, base + start * kElement, args.q.seq * kElement, args.dim_qk, 0,
                             rows);
      }
    }
    // Keys that no row of the sequence attends are zero.
    template <class T>
    TEA_DEVICE void load_keys(const T& to, const StridedTensor& rows, const PageTable& table,
                              int dim, int block) const {
      const auto* base = static_cast<const char*>(rows.data);
      const int64_t key = int64_t{block} * kCols;
      const int first = static_cast<int>(max(seq.attended.begin - key, int64_t{0}));
      const int last = static_cast<int>(min(seq.attended.end - key, int64_t{kCols}));
      if (C.general && args.keys.form == TEA_PAGED) {
        gather_rows<kCols>(to, rows, dim, first, last, [&](int r) {
          return base + paged_element(args, rows, table, seq.batch, kv_head, key + r) * kElement;
        });
        return;
      }
      const int64_t start =
          first_element(rows, args.keys, seq.kv, seq.batch, kv_head) + key * rows.seq;
      if (C.fp8 || (C.general && !rows.is_vectorizable))
        gather_rows<kCols>(to, rows, dim, first, last,
                           [&](int r) { return base + (start + r * rows.seq) * kElement; });
      else
        copy_rows<kCols>(to, base + start * kElement, rows.seq * kElement, dim, first, last);
    }
    TEA_DEVICE void load_k(int block) const {
      load_keys(k, args.k, args.page_table_k, args.dim_qk, block);
      commit_copies();
    }
    TEA_DEVICE void load_v(int block) const {
      load_keys(v, args.v, args.page_table_v, args.dim_v, block);
      commit_copies();
    }

    // ----------------------------------------------------------------------------- products

    // Of 16 head dimensions. One strip of rows has few products to hide the loads of the next ones
    // behind, and registers for them.
    struct Operands {
      Left<kDtype> q[kTall];
      Right<kDtype> k[kCols / 16];
    };
    static constexpr bool kAhead = !C.general && kTall == 1;
    TEA_DEVICE void multiply_qk(Scores& s) const {
#pragma unroll
      for (int m = 0; m < kTall; ++m)
#pragma unroll
        for (int n = 0; n < kCols / 8; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) s[m][n][i] = 0;
      const auto queries = part_of<true>(q, row);
      const auto operands = [&](int d) {
        Operands x;
#pragma unroll
        for (int m = 0; m < kTall; ++m) x.q[m] = load_left(queries.tile, 16 * m, d);
#pragma unroll
        for (int n = 0; n < kCols / 16; ++n) x.k[n] = load_right(k, 16 * n, d);
        return x;
      };
      Operands next;
      if (kAhead) next = operands(0);
#pragma unroll(C.general ? 4 : kDim / 16)  // rolled up, it compiles faster
      for (int d = 0; d < kDim; d += 16) {
        const Operands now = kAhead ? next : operands(d);
        if (kAhead && d + 16 < kDim) next = operands(d + 16);
#pragma unroll
        for (int n = 0; n < kCols / 16; ++n)
#pragma unroll
          for (int m = 0; m < kTall; ++m)
            multiply(s[m][2 * n], s[m][2 * n + 1], now.q[m], now.k[n]);
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
        for (int i = 0; i < 4; ++i) o[n][i] *= shrink[row_slot(i)];
    }

    // ------------------------------------------------------------------------------- scores

    TEA_DEVICE Edge edge() const {
      const auto near = [](int64_t x) {
        return static_cast<int>(min(max(x, int64_t{-1} << 30), int64_t{1} << 30));
      };
      return {near(tile.first + seq.band.lo), near(tile.first + seq.band.hi + 1),
              near(seq.kv.length)};
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
            if (!window[row_slot(i)].holds(column_of(n, i))) s[m][n][i] = kMinusInfinity;
      }
    }
    struct Slopes {  // of ALiBi
      float of[kTall][2];
    };
    TEA_DEVICE Slopes slopes_of() const {
      Slopes out;
#pragma unroll
      for (int m = 0; m < kTall; ++m)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const Query at = query(row + 16 * m + row_of(2 * r));
          out.of[m][r] = at.row < seq.q.length ? slope_of(args, seq.batch, at.head) : 0.0f;
        }
      return out;
    }
    TEA_DEVICE void transform_all(Scores& s, const Scaling& scaling, const Slopes& slopes,
                                  int block) const {
      const int64_t key = int64_t{block} * kCols;
#pragma unroll
      for (int m = 0; m < kTall; ++m) {
        RowTerms terms[2];
        Window window[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const Query at = query(row + 16 * m + row_of(2 * r));
          terms[r] = terms_of(args, seq, at.head, at.row, slopes.of[m][r]);
          window[r] = window_of(seq, at.row, key, kCols);
        }
        transform(s[m], args, seq, scaling, terms, window, key);
      }
    }
    TEA_DEVICE void drop_all(Scores& s, const Dropping& d, int block) const {
      const int64_t key = int64_t{block} * kCols + seq.origin_col;
#pragma unroll
      for (int m = 0; m < kTall; ++m)
        drop(s[m], d, tile.first + row + 16 * m + seq.origin_row, key,
             C.fp8 ? args.keep_factor : 1.0f);
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
            s[m][n][i] = cast_fp8(s[m][n][i] * scale, args.q.dtype);
          }
      return largest;
    }

    TEA_DEVICE Scaling scaling() const {
      return {C.fp8 ? scalar(args.fp8.q_inv) * scalar(args.fp8.k_inv) : 1.0f, args.scale};
    }

    // Fills o with the sum of values, weighted by exp(score - top). fp8 casts P relative to the
    // row's maximum, which it finds in a pass of its own. Returns the largest P before its cast.
    TEA_DEVICE float attend(Output& o, OnlineSoftmax (&softmax)[kTall], Blocks b) const {
      const float scale_log2 = C.general ? kLog2E : args.scale * kLog2E;
      const float slack =
          args.statistics.max || args.statistics.sum_exp ? 0.0f : OnlineSoftmax::kSlack;
      const Edge e = edge();
      const Slopes slopes = C.general ? slopes_of() : Slopes{};
      Dropping dropping = {};
      float s_scale = 1, largest = 0;
      if (C.general && args.rng) dropping = dropping_of(args, seq.batch, tile.head);
      if constexpr (C.fp8) {
        s_scale = scalar(args.fp8.s);
        const float largest_code = args.q.dtype == TEA_E4M3 ? kE4M3.largest : kE5M2.largest;
        if (threadIdx.x == 0 && saturates(s_scale, args.keep_factor, largest_code))
          report_status(args, TEA_STATUS_SATURATED);
      }
      for (int pass = C.fp8 ? 0 : 1; pass < 2; ++pass) {
        load_k(b.end - 1);
        for (int block = b.end - 1; block >= b.begin; --block) {
          wait_copies<0>();
          __syncthreads();  // K is there, and every warp has read V
          if (pass == 1) load_v(block);
          Scores s;
          multiply_qk(s);
          if constexpr (C.general)
            transform_all(s, scaling(), slopes, block);
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
            softmax[m].template update<C.fp8>(s[m], scale_log2, slack, shrink);
            // After the first block, which finds zeros, tops seldom rise. All lanes must agree.
            if (block != b.end - 1 && __any_sync(0xffffffff, shrink[0] != 1 || shrink[1] != 1))
              shrink_rows(o[m], shrink);
          }
          if (pass == 0) continue;
          if (C.general && args.rng) drop_all(s, dropping, block);
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
      const float more = value_factor(args, C.fp8);
#pragma unroll
      for (int m = 0; m < kTall; ++m)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const Query at = query(row + 16 * m + row_of(2 * r));
          const float max = softmax[m].top[r] * (C.general ? 1.0f : args.scale);
          const float total = quad_sum(softmax[m].sum[r]);
          const bool valid = at.row < seq.q.length;
          const RowResult result = result_of(max, total, valid ? sink_of(args, at.head) : 0.0f);
          out.of[m][r] = valid ? result.factor * more : 0.0f;
          if (lane() % 4 == 0 && column == 0 && at.row < written_rows(args, seq))
            store_per_row(args, seq, at, result, max, total);
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
                           finished_pair<kDtype>(&o[m][n][2 * r], factors.of[m][r]));
      __syncwarp();
      // The lane's piece stays; its row moves on. All loads of a batch before its stores.
      constexpr int kPieces = kOwnV / 8, kRowsAtOnce = 32 / kPieces;
      constexpr int kBatch = std::min(8, 16 * kTall / kRowsAtOnce);
      static_assert(kPieces <= 32 && 16 * kTall / kRowsAtOnce % kBatch == 0);
      const int local = row + lane() / kPieces, col = column + lane() % kPieces * 8;
      const int64_t rows = written_rows(args, seq), step = kRowsAtOnce * args.o.seq;
      auto* data = static_cast<uint16_t*>(args.o.data) + col +
                   first_element(args.o, args.queries, seq.q, seq.batch, 0);
      if constexpr (!C.general) data += (tile.first + local) * args.o.seq + tile.head * args.o.head;
#pragma unroll 1
      for (int from = local; from < local + 16 * kTall; from += kBatch * kRowsAtOnce) {
        uint4 x[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) x[i] = load_shared_16(to.at(from + i * kRowsAtOnce, col));
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          const Query at = query(from + i * kRowsAtOnce);
          const bool there = at.row < rows && col < args.dim_v;
          if constexpr (C.general) {
            if (there)
              *reinterpret_cast<uint4*>(data + at.row * args.o.seq + at.head * args.o.head) = x[i];
          } else {  // one head: the pointer moves on, which is shorter than a product for each row
            if (there) *reinterpret_cast<uint4*>(data) = x[i];
            data += step;
          }
        }
      }
    }
    // In any type and alignment.
    TEA_DEVICE void store_direct(const Output& o, const Factors& factors) const {
      const float scale = C.fp8 ? scalar(args.fp8.o) : 1.0f;
      const int64_t first = first_element(args.o, args.queries, seq.q, seq.batch, 0);
#pragma unroll
      for (int m = 0; m < kTall; ++m)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const Query at = query(row + 16 * m + row_of(2 * r));
          if (at.row >= written_rows(args, seq)) continue;
          const int64_t start = first + at.row * args.o.seq + at.head * args.o.head + column;
#pragma unroll
          for (int n = 0; n < kOwnV / 8; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i)
              if (column + 8 * n < args.dim_v)
                store_float(args.o.data, args.o.dtype, start + column_of(n, i),
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
            largest = fmaxf(largest, fabsf(finished(o[m][n][i], factors.of[m][row_slot(i)])));
      raise_by_warp(args.fp8.o_amax, largest);
      raise_by_warp(args.fp8.s_amax, s_largest);
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
          float* const to = p.partial.o + (first + local) * args.dim_v + column;
#pragma unroll
          for (int n = 0; n < kOwnV / 8; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i)
              if (column + 8 * n < args.dim_v) to[column_of(n, i)] = o[m][n][2 * r + i];
        }
    }

    static TEA_DEVICE void start(Output& o, OnlineSoftmax (&softmax)[kTall]) {
#pragma unroll
      for (int m = 0; m < kTall; ++m) {
        softmax[m].start();
#pragma unroll
        for (int n = 0; n < kOwnV / 8; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) o[m][n][i] = 0;
      }
    }

    TEA_DEVICE void run() const {
      Output o;
      OnlineSoftmax softmax[kTall];
      start(o, softmax);
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
        if (kDtype == TEA_FP32 || C.fp8 || !args.o.is_vectorizable) return store_direct(o, factors);
      if constexpr (kDtype != TEA_FP32) store_staged(o, factors);
    }
  };
};

// Named by a number, not by a Config: see hopper/forward_launch.cuh.
template <int kNumber>
__global__ void __launch_bounds__(Kernel<kNumber>::kThreads, Kernel<kNumber>::C.row.resident)
    forward_entry(const __grid_constant__ Parameters p) {
  extern __shared__ __align__(128) uint8_t memory[];
  using K = Kernel<kNumber>;
  typename K::Block(p, *reinterpret_cast<typename K::Smem*>(memory)).run();
}

}  // namespace tea::portable
