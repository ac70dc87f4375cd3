// What a block of the forward pass works on: which rows of which sequence, with which keys.
// Lengths, starts and origins come from device memory, are clamped, and are reported where they are
// nonsense.
#pragma once
#include "hopper/device/scheduler.cuh"
#include "hopper/device/softmax.cuh"
#include "hopper/forward.h"
#include "math/dropout.h"
#include "te_attention.h"

namespace tea::hopper {

// Blocks of keys, half open.
struct Blocks {
  int begin, end;
};

// What all tiles of a sequence have in common. Keys count from the first that any row attends to.
struct alignas(16) Common {
  int rows, start;  // of the sequence, and where that begins in the tensors of queries
  int keys, start_kv;
  int skipped;  // keys of the sequence before the first
  int lo, hi;   // the band: key - row of what is visible
  int delta;    // of the mask's diagonal, in the sequence: key - row
};

// A tile, as the planner tells all other roles; head < 0: there is no more. first: its first row,
// in the sequence. sink: -infinity if there is none.
struct AnyWork : Common {
  int head, head_kv, sequence, first;
  Blocks blocks;
  float sink;
};
// And what only some kernels read.
struct Work : AnyWork {
  Blocks own[4];  // where consumers may be apart: those that each one's 64 rows see,
  int turns;      // and the most that one of them sees
  // For the general kernels. Where row 0 and key 0 lie in the global problem, how far ALiBi's
  // diagonal lies from theirs, and its slope; dropout's seed and the third word of its counter; the
  // bias of row 0 and key 0, and which of the heads and sequences that it tells apart it is.
  int64_t global_row, global_key, diagonal;
  RngState rng;
  const char* bias;
  int bias_head, bias_sequence;
  float slope;
  uint32_t stream;

  TEA_DEVICE Columns seen(int row) const { return visible_columns({lo, hi}, row, keys); }
  // The same in 32 bits; of rows behind the last, what that one sees.
  TEA_DEVICE Blocks columns_of(int row) const {
    const int r = min(row, rows - 1);
    return {max(r + lo, 0), min(r + hi + 1, keys)};
  }
  // Those that some of `count` rows from `row` on attend to, in blocks of kCols.
  template <int kCols>
  TEA_DEVICE Blocks blocks_of(int row, int count) const {
    const int last = min(row + count, rows) - 1;
    const int begin = columns_of(row).begin, end = columns_of(last).end;
    if (last < row || begin >= end) return {0, 0};
    return {begin / kCols, (end + kCols - 1) / kCols};
  }
  // Those that all of 64 rows see in full, as far as there are that many.
  template <int kCols>
  TEA_DEVICE Blocks clear_of(int row) const {
    const int begin = columns_of(row + 63).begin, end = columns_of(row).end;
    return {(begin + kCols - 1) / kCols, max(end, 0) / kCols};
  }
};

TEA_HOST_DEVICE int64_t origin_of(const Forward& f, int dimension, bool* sane) {
  return clamp_origin(f.origin_device ? f.origin_device[dimension] : f.origin[dimension], sane);
}

// A difference of row and key, cut to what no pair of them exceeds.
TEA_HOST_DEVICE int cut(int64_t difference) {
  return static_cast<int>(max(min(difference, int64_t{kMaxRows - 1}), int64_t{-kMaxRows}));
}

TEA_DEVICE float sink_of(const Forward& f, int head) {
  if (f.sink == Sink::kTensor) return f.sinks[head];
  return f.sink == Sink::kZero ? 0 : kMinusInfinity;
}

TEA_HOST_DEVICE Common common_of(const Forward& f, int sequence) {
  const Sequence q = f.queries.at(sequence), kv = f.keys.at(sequence);
  bool sane;  // the caretaker reports
  const int64_t row = origin_of(f, 2, &sane), key = origin_of(f, 3, &sane);
  const int64_t delta = diagonal(f.mask.bottom_right, q.length, kv.length);
  const Band band = tea::band(f.mask, delta, row, key);
  const int64_t begin = visible_columns(band, 0, kv.length).begin;
  const int64_t end = visible_columns(band, q.length - 1, kv.length).end;
  const int64_t skipped = begin < end ? begin : 0;
  Common c;
  c.rows = static_cast<int>(q.length);
  c.start = static_cast<int>(q.start);
  c.keys = begin < end ? static_cast<int>(end - begin) : 0;
  c.start_kv = static_cast<int>(kv.start + skipped);
  c.skipped = static_cast<int>(skipped);
  c.lo = cut(band.lo - skipped);
  c.hi = cut(band.hi - skipped);
  c.delta = static_cast<int>(delta);
  return c;
}
// Whether that is the same for all sequences, and known to the host.
inline bool alike(const Forward& f) {
  return f.queries.form == Form::kDense && f.keys.form == Form::kDense && !f.origin_device;
}
// group: heads for each of keys.
template <int kRows, int kCols, class D>
TEA_DEVICE void describe(Work& w, const Forward& f, const Common& c, const D& group,
                         const Tile& t) {
  static_cast<Common&>(w) = c;
  w.head = t.head;
  w.head_kv = t.head / group;
  w.sequence = t.batch;
  w.first = t.row_block * kRows;
  w.sink = sink_of(f, t.head);
  w.blocks = w.template blocks_of<kCols>(w.first, kRows);
}
// Where the tile's sequence lies in the global problem.
TEA_DEVICE void add_origin(Work& w, const Forward& f) {
  bool sane;
  w.global_row = origin_of(f, 2, &sane);
  w.global_key = origin_of(f, 3, &sane) + w.skipped;
  w.diagonal = w.delta + w.global_row - w.global_key;
}

// What each of kRows / 64 consumers works on.
template <int kRows, int kCols>
TEA_DEVICE void share_out(Work& w) {
  w.turns = 0;
#pragma unroll 1
  for (int c = 0; c < kRows / 64; ++c) {
    w.own[c] = w.template blocks_of<kCols>(w.first + 64 * c, 64);
    w.turns = max(w.turns, w.own[c].end - w.own[c].begin);
  }
}

// The order of `heads` heads' tiles of so many consumers. Without a mask all are equal, and a head
// at a time needs the least cache. Else long ones go first, of several heads together: so many that
// they make three tiles of 128 rows for each processor, or six of 256, at least 32, but at 128 rows
// no more than half as many as there are processors. Then some of the first tiles find in the cache
// what others load, and few wait for memory while all do. That fewer would fit the cache does not
// matter.
__host__ __device__ inline TileOrder order_of(const Forward& f, int row_blocks, int heads,
                                              int batch, int consumers, bool masked) {
  constexpr int kProcessors = 132;
  const auto most = [](int a, int b) { return a > b ? a : b; };
  const auto least = [](int64_t a, int64_t b) { return a < b ? a : b; };
  const int64_t all = int64_t{heads} * batch, group = f.heads / f.heads_kv;
  const int many = most(kProcessors * 3 / 2 * consumers / most(row_blocks, 1), 32);
  const int64_t together = masked ? least(many, kProcessors / 4 * consumers) * group : 1;
  return {row_blocks, heads, batch, most(static_cast<int>(least(together, all)), 1), masked};
}

// Tiles by number: of equal sequences in one order over all heads, else sequence by sequence.
template <int kRows, bool kMasked>
struct Tiles {
  const Forward& f;
  const TileOrder& order;
  const TileOrder::Steps<Divisor>& steps;
  Common (&window)[32];  // of the sequences that are searched, by their number modulo 32
  GroupTiles groups{};

  static TEA_DEVICE int blocks_of(int rows) { return (rows + kRows - 1) / kRows; }
  // A number of tiles that there are, if no more than that.
  static TEA_DEVICE int certain(const Forward& f, const TileOrder& order) {
    if (f.queries.form == Form::kDense) return order.count();
    const int64_t rows = int64_t{f.queries.cu_seqlens[f.batch]} - f.queries.cu_seqlens[0];
    return static_cast<int>(min(rows / kRows * f.heads, int64_t{INT32_MAX / 2}));
  }
  // Of a sequence that comes to be searched, by the lane of its number.
  TEA_DEVICE int row_blocks(int sequence) const {
    const Common c = common_of(f, sequence);
    window[sequence % 32] = c;
    return blocks_of(c.rows);
  }
  // All lanes of a warp; numbers do not fall. False past the last.
  TEA_DEVICE bool find(int number, Tile& t) {
    if (f.queries.form == Form::kDense) {
      if (number >= order.count()) return false;
      t = order.at(number, steps);
      return true;
    }
    if (const int together = order.sequences_at_once(); kMasked && together > 1)
      return groups.find(
          number, f.batch, steps.heads, together,
          [&](int sequence) { return row_blocks(sequence); }, t);
    const auto tiles_of = [&](int sequence) { return row_blocks(sequence) * f.heads; };
    int sequence, rest;
    if (!groups.search.find(number, f.batch, tiles_of, sequence, rest)) return false;
    __syncwarp();  // for the window
    const int blocks = blocks_of(window[sequence % 32].rows);
    t = order_of(f, blocks, f.heads, 1, kRows / 64, kMasked).at(rest);
    t.batch = sequence;
    return true;
  }
};

// Looks after what no tile covers, on threads that have nothing else to do: rows outside every
// sequence become zeros, and nonsense in device memory is reported.
struct Caretaker {
  const Forward& f;
  const int first, step;  // this thread's share; whole warps

  TEA_DEVICE void report(int bit) const {
    if (f.status) atomicOr(f.status, bit);
  }
  TEA_DEVICE void check() const {
#pragma unroll 1  // here and below: few registers, and no hurry
    for (int i = first; i < f.batch; i += step)
      if (!f.queries.at(i).sane || !f.keys.at(i).sane) report(TEA_STATUS_BAD_LENGTHS);
    bool sane = true;
#pragma unroll 1
    for (int i = first; i < 4; i += step) origin_of(f, i, &sane);
    if (!sane) report(TEA_STATUS_BAD_ORIGIN);
  }

  TEA_DEVICE bool holds(int sequence, int64_t token) const {
    const Sequence s = f.queries.at(sequence);
    return token >= s.start && token < s.start + s.length;
  }
  // Where starts rise, as they do unless someone shuffled them, the first look finds the sequence.
  TEA_DEVICE bool in_some_sequence(int64_t token) const {
    const int32_t* starts = f.queries.offsets ? f.queries.offsets : f.queries.cu_seqlens;
    const auto likely = static_cast<int>(find_sequence(starts, f.batch, token));
    if (likely >= 0 && holds(likely, token)) return true;
#pragma unroll 1
    for (int i = 0; i < f.batch; ++i)
      if (holds(i, token)) return true;
    return false;
  }

  // By a warp: one row of O, and its LSE, MAX and SUM_EXP, of all heads.
  TEA_DEVICE void clear(int64_t batch, int64_t row) const {
    const int pieces = f.dim_v / 8;  // of 16 bytes
#pragma unroll 1
    for (int i = lane(); i < f.heads * pieces; i += 32) {
      const int64_t at = batch * f.o.batch + i / pieces * f.o.head + row * f.o.row + i % pieces * 8;
      *reinterpret_cast<uint4*>(static_cast<uint16_t*>(f.o.data) + at) = uint4{};
    }
    const auto set = [&](const Strided& x, int64_t head, float value) {
      if (x.data)
        static_cast<float*>(x.data)[batch * x.batch + head * x.head + row * x.row] = value;
    };
#pragma unroll 1
    for (int h = lane(); h < f.heads; h += 32) {
      set(f.lse, h, kMinusInfinity);
      set(f.max, h, kMinusInfinity);
      set(f.sum_exp, h, 0);
    }
  }

  TEA_DEVICE void run() const {
    check();
    if (f.queries.form == Form::kDense) return;
    const bool ragged = f.queries.form == Form::kRagged;
    const int64_t rows = ragged ? f.queries.tokens : f.queries.rows;
    const int64_t count = ragged ? rows : rows * f.batch;
    for (int64_t base = first - lane(); base < count; base += step) {
      const int64_t mine = base + lane();
      bool outside = false;
      if (mine < count)
        outside =
            ragged ? !in_some_sequence(mine) : !holds(static_cast<int>(mine / rows), mine % rows);
      for (uint32_t left = __ballot_sync(0xffffffff, outside); left; left &= left - 1) {
        const int64_t row = base + __ffs(static_cast<int>(left)) - 1;
        clear(ragged ? 0 : row / rows, ragged ? row : row % rows);
      }
    }
  }
};

}  // namespace tea::hopper
