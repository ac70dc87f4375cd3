// The work descriptor of a tile: a block of keys of one key head, and the query rows that attend to
// them. The scheduler warp writes it, all other roles read it.
#pragma once
#include "gpu/arguments.cuh"
#include "gpu/fast_divisor.h"
#include "hopper/backward/backward.h"
#include "hopper/backward/workspace.h"

namespace tea::hopper::backward {

// The parameters by which tiles are found.
struct TileParams {
  AttentionArguments args;
  Workspace work;
  FastDivisor parts;     // tiles that share a key block and key head
  int heads_per_tile;    // query heads of a tile
  int descending_heads;  // of all sequences: those that begin with the last key block

  TEA_HOST_DEVICE bool is_descending(int batch, int head) const {
    return batch * (args.heads_kv * int{parts}) + head < descending_heads;
  }
};

// The part of a descriptor that all tiles of a sequence share. Rows are counted from the first one
// that attends to any key, keys from the first one that any row attends to; a key is visible to a
// row iff lo <= key - row <= hi.
struct alignas(16) SequenceBounds {
  int rows, start_q;   // rows that attend to some key, and the first of them in the buffer
  int keys, start_kv;  // keys that some row attends to
  int lo, hi;
  int row_block, key_block;  // the first blocks in the workspace
};

// A half-open range of row blocks, key blocks or rows.
struct Range {
  int begin, end;
};

// head_kv < 0: there is no more work.
struct WorkTile : SequenceBounds {
  int head_kv, part, batch;
  int first_head, last_head;  // query heads first_head to last_head - 1
  int key_block_index, first_key;
  bool descending;   // the order of the key blocks that contribute to dQ
  Range row_blocks;  // that attend to some key of the tile

  // The key blocks that some of `count` rows from `row` on attend to.
  TEA_DEVICE Range visible_key_blocks(int row, int count) const {
    const int last = min(row + count, rows) - 1;
    return {max(row + lo, 0) / kBlockN, (min(last + hi + 1, keys) + kBlockN - 1) / kBlockN};
  }
  // The rank of this tile's contribution among those of `blocks`.
  TEA_DEVICE int rank_among(const Range& blocks) const {
    return descending ? blocks.end - 1 - key_block_index : key_block_index - blocks.begin;
  }
};

TEA_DEVICE int clamp_bound(int64_t difference) {
  return static_cast<int>(max(min(difference, int64_t{kMaxSeqlen - 1}), int64_t{-kMaxSeqlen}));
}

// Invalid lengths and origins are clamped here; the preprocess kernel reports them.
template <int kBlockM>
TEA_DEVICE SequenceBounds bounds_of(const TileParams& p, int batch) {
  const AttentionArguments& a = p.args;
  bool valid;
  const SequencePair pair =
      sequence_pair_of(a, batch, sequence_of(a.queries, batch), sequence_of(a.keys, batch), &valid);
  const Columns rows = attending_rows(pair), keys = pair.attended;
  SequenceBounds b{};
  if (rows.begin >= rows.end || keys.begin >= keys.end) return b;
  b.rows = static_cast<int>(rows.end - rows.begin);
  b.start_q = static_cast<int>(pair.q.start + rows.begin);
  b.keys = static_cast<int>(keys.end - keys.begin);
  b.start_kv = static_cast<int>(pair.kv.start + keys.begin);
  b.lo = clamp_bound(pair.band.lo + rows.begin - keys.begin);
  b.hi = clamp_bound(pair.band.hi + rows.begin - keys.begin);
  b.row_block = static_cast<int>(p.work.row_blocks.first(a.queries, kBlockM, batch, pair.q.length));
  b.key_block = static_cast<int>(p.work.key_blocks.first(a.keys, kBlockN, batch, pair.kv.length));
  return b;
}

struct TileIndex {
  int key_block, head, batch;  // head: head_kv * parts + part
};

template <int kBlockM>
TEA_DEVICE void describe(WorkTile& w, const TileParams& p, const SequenceBounds& bounds,
                         const TileIndex& t) {
  static_cast<SequenceBounds&>(w) = bounds;
  w.head_kv = t.head / p.parts;
  w.part = t.head - w.head_kv * p.parts;
  w.batch = t.batch;
  const int heads = p.heads_per_tile;
  w.first_head = t.head * heads;
  w.last_head = w.first_head + heads;
  w.key_block_index = t.key_block;
  w.descending = p.is_descending(t.batch, t.head);
  w.first_key = t.key_block * kBlockN;
  const int last_key = min(w.first_key + kBlockN, w.keys) - 1;
  w.row_blocks = {max(w.first_key - w.hi, 0) / kBlockM,
                  (min(last_key - w.lo + 1, w.rows) + kBlockM - 1) / kBlockM};
}

}  // namespace tea::hopper::backward
