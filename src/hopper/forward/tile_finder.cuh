// From the number of a tile to its place in the problem.
#pragma once
#include "hopper/forward/work_tile.cuh"

namespace tea::hopper {

// Finds a tile by its number: in one order over all heads if sequences have the same length, else
// sequence by sequence.
template <int kBlockM, bool kMasked>
struct TileFinder {
  const AttentionArguments& args;
  const TileOrder& order;
  const TileOrder::Divisors<FastDivisor>& divisors;
  SequenceBounds (&window)[32];  // of the sequences that are searched, by batch entry modulo 32
  SequenceGroupSearch groups{};

  TEA_DEVICE int num_sequences() const { return static_cast<int>(args.batch); }
  static TEA_DEVICE int row_blocks_of(int rows) { return (rows + kBlockM - 1) / kBlockM; }

  // A lower bound of the number of tiles, without a search.
  static TEA_DEVICE int guaranteed_tiles(const AttentionArguments& a, const TileOrder& order) {
    if (a.queries.form == TEA_DENSE) return order.count();
    const int64_t rows = int64_t{a.queries.cu_seqlens[a.batch]} - a.queries.cu_seqlens[0];
    return static_cast<int>(min(rows / kBlockM * a.heads_q, int64_t{INT32_MAX / 2}));
  }
  // The row blocks of a sequence that enters the search, called by the lane that holds it.
  TEA_DEVICE int enter_window(int batch) const {
    const SequenceBounds bounds = bounds_of(args, batch);
    window[batch % 32] = bounds;
    return row_blocks_of(bounds.seqlen_q);
  }
  // Called by all lanes of a warp, with numbers that never decrease. Returns false beyond the last
  // tile.
  TEA_DEVICE bool find(int number, TileIndex& t) {
    if (args.queries.form == TEA_DENSE) {
      if (number >= order.count()) return false;
      t = order.at(number, divisors);
      return true;
    }
    if (const int together = order.sequences_at_once(); kMasked && together > 1)
      return groups.find(
          number, num_sequences(), divisors.heads, together,
          [&](int batch) { return enter_window(batch); }, t);
    const auto tiles_of = [&](int batch) { return enter_window(batch) * args.heads_q; };
    int batch, rest;
    if (!groups.search.find(number, num_sequences(), tiles_of, batch, rest)) return false;
    __syncwarp();  // the window was written by other lanes
    const SequenceBounds& bounds = window[batch % 32];
    const HeadShape shape = head_shape(args, bounds, kBlockM / 64, kMasked);
    t = make_tile_order(row_blocks_of(bounds.seqlen_q), 1, shape).at(rest);
    t.batch = batch;
    return true;
  }
};

}  // namespace tea::hopper
