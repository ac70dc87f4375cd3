// The work descriptor of a tile: which rows of which sequence it computes, and which keys they
// attend to. The scheduler warp writes it, all other roles read it.
#pragma once
#include "gpu/arguments.cuh"
#include "hopper/device/softmax.cuh"
#include "hopper/forward/config.h"
#include "hopper/forward/forward.h"
#include "hopper/forward/tile_order.cuh"

namespace tea::hopper {

// A half-open range of key blocks or of keys.
struct Range {
  int begin, end;
};

// The part of a descriptor that all tiles of a sequence share. Keys are counted from the first one
// that any row attends to; a key is visible to a row iff lo <= key - row <= hi.
struct alignas(16) SequenceBounds {
  int seqlen_q, start_q;    // rows, and the first of them in a ragged buffer
  int seqlen_kv, start_kv;  // keys that some row attends to
  int skipped_keys;         // keys of the sequence before the first of these
  int lo, hi;
  int diagonal;  // key - row on the mask's diagonal, counted from the start of the sequence,
                 // without the shift of the run
};

// The part of a descriptor that every kernel reads. head < 0: there is no more work.
struct WorkTileBase : SequenceBounds {
  int head, head_kv, batch, first_row;
  Range blocks;  // key blocks that some row of the tile attends to
  float sink;    // -infinity: none
};

struct WorkTile : WorkTileBase {
  // Where consumers are staggered: the blocks that each consumer's 64 rows attend to, and the most
  // blocks that any of them has.
  Range consumer_blocks[4];
  int max_consumer_blocks;
  // For score modifications: the global positions of row 0 and key 0, ALiBi's diagonal relative to
  // them, dropout's seed and the third word of its counter, the bias of row 0 and key 0 and its
  // coordinates in the tensor map, ALiBi's slope.
  int64_t global_row, global_key, alibi_diagonal;
  RngState rng;
  const char* bias;
  int bias_head, bias_batch;
  float slope;
  uint32_t dropout_stream;

  // The keys that a row attends to; for rows past the end of the sequence, those of the last row.
  TEA_DEVICE Range visible_keys(int row) const {
    const int r = min(row, seqlen_q - 1);
    return {max(r + lo, 0), min(r + hi + 1, seqlen_kv)};
  }
  // The blocks with a key that one of `count` rows from `row` on attends to.
  template <int kBlockN>
  TEA_DEVICE Range visible_blocks(int row, int count) const {
    const int last = min(row + count, seqlen_q) - 1;
    const int begin = visible_keys(row).begin, end = visible_keys(last).end;
    if (last < row || begin >= end) return {0, 0};
    return {begin / kBlockN, (end + kBlockN - 1) / kBlockN};
  }
  // The blocks whose keys all of 64 rows from `row` on attend to, which need no mask.
  template <int kBlockN>
  TEA_DEVICE Range unmasked_blocks(int row) const {
    const int begin = visible_keys(row + 63).begin, end = visible_keys(row).end;
    return {(begin + kBlockN - 1) / kBlockN, max(end, 0) / kBlockN};
  }
};

// A difference of key and row, clamped to what no pair of them exceeds.
TEA_HOST_DEVICE int clamp_difference(int64_t difference) {
  return static_cast<int>(max(min(difference, int64_t{kMaxSeqlen - 1}), int64_t{-kMaxSeqlen}));
}

TEA_HOST_DEVICE SequenceBounds make_bounds(const SequencePair& pair) {
  const Columns keys = pair.attended;
  const int64_t skipped = keys.begin < keys.end ? keys.begin : 0;
  SequenceBounds b;
  b.seqlen_q = static_cast<int>(pair.q.length);
  b.start_q = static_cast<int>(pair.q.start);
  b.seqlen_kv = keys.begin < keys.end ? static_cast<int>(keys.end - keys.begin) : 0;
  b.start_kv = static_cast<int>(pair.kv.start + skipped);
  b.skipped_keys = static_cast<int>(skipped);
  b.lo = clamp_difference(pair.band.lo - skipped);
  b.hi = clamp_difference(pair.band.hi - skipped);
  b.diagonal = static_cast<int>(pair.diagonal - pair.shift);
  return b;
}
// Invalid lengths and origins are clamped here; the zero-fill warps report them.
TEA_HOST_DEVICE SequenceBounds bounds_of(const AttentionArguments& a, int batch) {
  bool valid;
  return make_bounds(sequence_pair_of(a, batch, sequence_of(a.queries, batch),
                                      sequence_of(a.keys, batch), &valid));
}

// The properties that decide the order of tiles. Bounds that only the device knows are zero on the
// host: K and V then count as if they fitted L2.
TEA_HOST_DEVICE HeadShape head_shape(const AttentionArguments& a, const SequenceBounds& b,
                                     int consumers, bool masked) {
  const int64_t keys = min(int64_t{b.seqlen_kv}, int64_t{b.hi} - b.lo + 1);
  return {a.heads_q, a.heads_q / a.heads_kv, consumers, keys * (a.dim_qk + a.dim_v) * 2, masked};
}

template <int kBlockM, int kBlockN, class D>
TEA_DEVICE void describe(WorkTile& w, const AttentionArguments& a, const SequenceBounds& bounds,
                         const D& heads_per_kv, const TileIndex& t) {
  static_cast<SequenceBounds&>(w) = bounds;
  w.head = t.head;
  w.head_kv = t.head / heads_per_kv;
  w.batch = t.batch;
  w.first_row = t.row_block * kBlockM;
  w.sink = sink_of(a, t.head);
  w.blocks = w.template visible_blocks<kBlockN>(w.first_row, kBlockM);
}
// The tile's position in the global problem.
TEA_DEVICE void describe_origin(WorkTile& w, const AttentionArguments& a) {
  bool valid;
  w.global_row = origin_of(a, w.batch, 2, &valid);
  w.global_key = origin_of(a, w.batch, 3, &valid) + w.skipped_keys;
  w.alibi_diagonal = w.diagonal + shift_of(a, w.batch, &valid) + w.global_row - w.global_key;
}
// The key blocks of each of kBlockM / 64 consumers.
template <int kBlockM, int kBlockN>
TEA_DEVICE void describe_consumer_blocks(WorkTile& w) {
  w.max_consumer_blocks = 0;
#pragma unroll 1
  for (int c = 0; c < kBlockM / 64; ++c) {
    w.consumer_blocks[c] = w.template visible_blocks<kBlockN>(w.first_row + 64 * c, 64);
    w.max_consumer_blocks =
        max(w.max_consumer_blocks, w.consumer_blocks[c].end - w.consumer_blocks[c].begin);
  }
}

}  // namespace tea::hopper
