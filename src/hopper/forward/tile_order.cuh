// The order in which the tiles of a launch are visited. A tile is a block of query rows of one head
// of one batch entry.
#pragma once
#include "gpu/fast_divisor.h"
#include "hopper/device/accumulator.cuh"

namespace tea::hopper {

struct TileIndex {
  int row_block, head, batch;
};

// The order of tiles when all sequences have the same length. The tiles of `heads_at_once` heads
// are interleaved. Heads that do not fill such a group come first, because the last group must be
// full for all SMs to finish together. longest_first: later rows come before earlier ones, so that
// under a causal mask the last tiles to start are short. The first last_blocks row blocks of all
// heads come after everything else, so that a few heads at once suffice: their last tiles may leave
// SMs unequally busy, which the many short tiles at the end make up for.
struct TileOrder {
  int row_blocks, heads, batch, heads_at_once;
  bool longest_first;
  int last_blocks = 0;

  __host__ __device__ int count() const { return row_blocks * heads * batch; }
  // The number of sequences whose tiles are interleaved when lengths differ and only the device
  // knows them: a power of two, at most a warp.
  __host__ __device__ int sequences_at_once() const {
    int n = 1;
    while (longest_first && n < 32 && 2 * n * heads <= heads_at_once) n *= 2;
    return n;
  }

  // The divisors of at(), which are the same for all tiles. D is int, or FastDivisor where the host
  // prepares them. remainder: heads that do not fill a group; group_tiles: tiles of a full group.
  template <class D>
  struct Divisors {
    int remainder;
    D remainder_or_1, heads_at_once, group_tiles, heads, all_heads;
  };
  template <class D>
  __host__ __device__ Divisors<D> divisors() const {
    const int all = heads * batch, left = all % heads_at_once;
    const int tiles = (row_blocks - last_blocks) * heads_at_once;
    return {left,     D(left > 0 ? left : 1), D(heads_at_once), D(tiles > 0 ? tiles : 1),
            D(heads), D(all > 0 ? all : 1)};
  }

  __host__ __device__ TileIndex at(int number) const { return at(number, divisors<int>()); }
  template <class D>
  __host__ __device__ TileIndex at(int number, const Divisors<D>& by) const {
    const int blocks = row_blocks - last_blocks, in_groups = number - by.remainder * blocks;
    const int in_last = number - blocks * by.all_heads;
    int first = 0, row = 0, head = 0;
    if (in_last >= 0) {
      row = blocks + in_last / by.all_heads, head = in_last % by.all_heads;
    } else if (in_groups < 0) {
      row = number / by.remainder_or_1, head = number % by.remainder_or_1;
    } else {
      const int group = in_groups / by.group_tiles, rest = in_groups % by.group_tiles;
      first = by.remainder + group * by.heads_at_once;
      row = rest / by.heads_at_once, head = rest % by.heads_at_once;
    }
    head += first;
    return {longest_first ? row_blocks - 1 - row : row, head % by.heads, head / by.heads};
  }
};

// The heads of sequences of one length, `consumers` warpgroups for each tile of them.
struct HeadShape {
  int heads, heads_per_kv, consumers;
  int64_t kv_head_bytes;  // K and V of one key head, within the window of a row
  bool masked;
};

// The order of the tiles of `batch` sequences. Without a mask all tiles take the same time, and one
// head at a time needs the least cache. With a mask long tiles come first, from several heads: as
// many as make three tiles of 128 rows or six of 256 for each SM, at least 32, but at 128 rows at
// most half as many as there are SMs. Some of the first tiles then find in L2 what others have
// loaded, and few wait for memory at the same time. Long sequences run at the power limit, where
// loads from memory cost energy and so time: as many heads as keep K and V in L2. Where these heads
// make fewer than three tiles for each SM (six of 256 rows), the first three eighths of the rows of
// all heads come at the end; sequences of few row blocks keep the larger number of heads instead.
__host__ __device__ inline TileOrder make_tile_order(int row_blocks, int batch,
                                                     const HeadShape& x) {
  constexpr int kSms = 132, kLong = 32;   // row blocks
  constexpr int64_t kL2Bytes = 32 << 20;  // of 50 MiB
  const auto most = [](int64_t a, int64_t b) { return a > b ? a : b; };
  const auto least = [](int64_t a, int64_t b) { return a < b ? a : b; };
  const int64_t all = int64_t{x.heads} * batch;
  const int64_t tiles = kSms * 3 / 2 * x.consumers;
  const int64_t many = least(most(tiles / most(row_blocks, 1), 32), kSms / 4 * x.consumers);
  const int64_t cached = most(kL2Bytes / most(x.kv_head_bytes, 1), 1);
  const bool is_few = cached * row_blocks < tiles, is_long = row_blocks >= kLong;
  const int64_t heads_kv = is_few && !is_long ? many : least(many, cached);
  const int64_t together = x.masked ? heads_kv * x.heads_per_kv : 1;
  const int64_t at_once = most(least(together, all), 1);
  const int last_blocks = x.masked && is_few && is_long && at_once < all ? row_blocks * 3 / 8 : 0;
  return {row_blocks, x.heads, batch, static_cast<int>(at_once), x.masked, last_blocks};
}

// Finds the tile of a number among sequences whose lengths only the device knows: a warp computes a
// prefix sum over the tiles of 32 sequences at a time. All lanes call, with numbers that never
// decrease.
struct SequenceSearch {
  int window = -32, before = 0, inclusive = 0, total = 0;

  // Tile `number` is tile `rest` of its sequence. Returns false beyond the last tile.
  template <class Count>
  TEA_DEVICE bool find(int number, int sequences, Count&& tiles_of, int& sequence, int& rest) {
    while (number - before >= total) {
      if (window + 32 >= sequences) return false;
      before += total;
      window += 32;
      inclusive = window + lane() < sequences ? tiles_of(window + lane()) : 0;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int below = __shfl_up_sync(0xffffffff, inclusive, step);
        if (lane() >= step) inclusive += below;
      }
      total = __shfl_sync(0xffffffff, inclusive, 31);
    }
    const int index = __popc(__ballot_sync(0xffffffff, number - before >= inclusive));
    const int passed = __shfl_sync(0xffffffff, inclusive, index > 0 ? index - 1 : 0);
    sequence = window + index;
    rest = number - before - (index > 0 ? passed : 0);
    return true;
  }
};

// The same with the tiles of `group` consecutive sequences interleaved, longest first. Otherwise
// the long tiles of the last sequence would start when everything else has finished.
// row_blocks_of() gives the row blocks of a sequence, each of which is a tile for every head.
struct SequenceGroupSearch {
  SequenceSearch search{};

  template <class D, class Count>
  TEA_DEVICE bool find(int number, int sequences, const D& heads, int group, Count&& row_blocks_of,
                       TileIndex& t) {
    const auto tiles_of = [&](int sequence) { return row_blocks_of(sequence) * heads; };
    int sequence, rest;
    if (!search.find(number, sequences, tiles_of, sequence, rest)) return false;
    const int start = (sequence - search.window) / group * group;  // the group's first lane
    const int below = __shfl_up_sync(0xffffffff, search.inclusive, 1);
    const int before = lane() > 0 ? below : 0;  // tiles of the window before this lane's
    const bool mine = lane() / group == start / group;
    const int blocks = mine ? (search.inclusive - before) / heads : 0;
    rest = number - search.before - __shfl_sync(0xffffffff, before, start);
    int level = __reduce_max_sync(0xffffffff, blocks);
    for (;; --level) {
      const uint32_t as_long = __ballot_sync(0xffffffff, blocks >= level);
      const int tiles = __popc(as_long) * heads;
      if (rest < tiles) {
        const int rank = __popc(as_long & ((1u << lane()) - 1));
        const bool chosen = blocks >= level && rank == rest / heads;
        const int at = __ffs(static_cast<int>(__ballot_sync(0xffffffff, chosen))) - 1;
        t = {level - 1, rest % heads, search.window + at};
        return true;
      }
      rest -= tiles;
    }
  }
};

}  // namespace tea::hopper
