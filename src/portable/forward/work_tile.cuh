// The tile of a CTA: which rows of which sequence it computes, and which key blocks they attend to.
#pragma once
#include "portable/arguments.cuh"
#include "portable/forward/params.h"
#include "portable/forward/shared_memory.cuh"

namespace tea::portable {

// The query of one row of a tile.
struct QueryIndex {
  int64_t row;
  int head;
};
TEA_DEVICE QueryIndex query_index(const TileScheduler& s, const TileIndex& tile, int local) {
  const int64_t packed = tile.first + local;
  if (s.pack == 1) return {packed, tile.head};
  return {packed / s.pack, tile.head + static_cast<int>(packed % s.pack)};
}

// A half-open range of key blocks.
struct KeyBlocks {
  int begin, end;
};

template <KernelConfig C>
struct WorkTile {
  using T = Traits<C>;

  const KernelParams& p;
  const AttentionArguments& args;
  const TileIndex index;
  const SequencePair seq;
  const int kv_head;
  const int row, column;  // the warp's first row in the tile and its first column of O

  TEA_DEVICE explicit WorkTile(const KernelParams& params)
      : p(params),
        args(p.args),
        index(p.scheduler.at(p.first_cta + blockIdx.x)),
        seq(sequence_pair_of(args, index.batch)),
        kv_head(index.head / p.heads_per_kv),
        row(warp() % C.tile.warps_m * 16 * T::kMmaM),
        column(C.tile.warps_n == 1 ? 0 : warp() / C.tile.warps_m * T::kWarpPieceV) {}

  // The first of the warp's columns of O 8 * n.. A warp has some of each piece of V.
  TEA_DEVICE int output_column(int n) const {
    constexpr int kTiles = T::kWarpPieceV / 8;
    return column + n / kTiles * T::kPieceV + n % kTiles * 8;
  }

  TEA_DEVICE QueryIndex query(int local) const {
    if constexpr (!C.general) return {index.first + local, index.head};
    return query_index(p.scheduler, index, local);
  }
  // The query of the thread's row r of the warp's 16 rows m.
  TEA_DEVICE QueryIndex thread_query(int m, int r) const { return query(thread_row(m, r)); }
  TEA_DEVICE int thread_row(int m, int r) const { return row + 16 * m + accumulator_row(2 * r); }

  // Rows of the tile that the sequence has, of all packed heads.
  TEA_DEVICE int valid_rows() const {
    const int64_t rows = seq.q.length * (C.general ? p.scheduler.pack : 1) - index.first;
    return static_cast<int>(max(int64_t{0}, min(rows, int64_t{T::kBlockM})));
  }

  // Of some key blocks those of a split with fixed bounds.
  TEA_DEVICE KeyBlocks split_of(const KeyBlocks& all, int split) const {
    const int64_t size = p.scheduler.split_blocks, begin = split * size, end = begin + size;
    return {static_cast<int>(min(max(begin, int64_t{all.begin}), int64_t{all.end})),
            static_cast<int>(max(min(end, int64_t{all.end}), int64_t{all.begin}))};
  }

  // The blocks with a key that one of the first `rows` rows attends to; of these, the tile's split.
  TEA_DEVICE KeyBlocks key_blocks(int rows) const {
    if (rows == 0) return {0, 0};
    const int64_t begin = visible_columns(seq.band, query(0).row, seq.kv.length).begin;
    const int64_t end = visible_columns(seq.band, query(rows - 1).row, seq.kv.length).end;
    if (begin >= end) return {0, 0};
    const KeyBlocks all = {static_cast<int>(begin / T::kBlockN),
                           static_cast<int>((end + T::kBlockN - 1) / T::kBlockN)};
    if constexpr (!C.general) return all;
    if (p.scheduler.split_blocks) return split_of(all, p.scheduler.first_split + index.split);
    const int count = (all.end - all.begin + p.scheduler.splits - 1) / p.scheduler.splits;
    const int first = all.begin + index.split * count;
    return {min(first, all.end), min(first + count, all.end)};
  }
};

}  // namespace tea::portable
