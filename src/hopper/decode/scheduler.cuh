// Which tiles a CTA computes. The key blocks of all tiles are divided into shares of equal size
// (Stream-K: Osama et al., 2023), so a CTA has a part of one tile, or the end of one, some whole
// tiles and the beginning of another. It computes them from the last to the first: see
// epilogue.cuh. Each share has p.tiles_at_once CTAs, for as many adjacent tiles of a sequence.
#pragma once
#include "hopper/decode/params.cuh"

namespace tea::hopper::decode {

// A CTA's part of a tile: packed rows of a sequence and a head of K and V, over the key blocks
// [first, end) of the tile's `blocks`.
struct WorkItem {
  SequenceBounds bounds;
  int batch;
  int tile;  // of the sequence
  int first, end, blocks;

  // Where a tile holds all rows of a head of K and V.
  TEA_DEVICE int head_kv() const { return tile; }

  TEA_DEVICE bool begins_tile() const { return first == 0; }
  TEA_DEVICE bool ends_tile() const { return end == blocks; }
  // The end of the blocks that have keys.
  TEA_DEVICE int end_of_keys() const { return bounds.seqlen_kv == 0 ? first : end; }
};

// Where the search for a CTA's first item leaves its results in shared memory.
struct SearchStorage {
  int64_t warp_blocks[32];
  int batch, group, end;
};

template <BlockShape kShape, bool kIsPlain = false>
struct WorkCursor {
  Shares shares;
  int64_t remaining;  // blocks of the CTA's share before `item`
  int share;
  WorkItem item;

  TEA_DEVICE bool has_work() const { return share < shares.count; }
  // The number of the tile's first block among those of all tiles of the share's heads.
  TEA_DEVICE int64_t tile_begin() const { return shares.begin(share) + remaining - item.first; }

  TEA_DEVICE void enter_sequence(const KernelParams& p, int batch) {
    item.batch = batch;
    item.bounds = is_uniform<kIsPlain>(p) ? p.bounds : bounds_of(p.args, batch);
    item.blocks = tile_blocks(kShape, item.bounds.seqlen_q, item.bounds.seqlen_kv);
  }
  // The units of a tile that are divided into shares: blocks, or parts.
  static TEA_DEVICE int units(const KernelParams& p, int blocks) {
    const int of_part = part_blocks<kIsPlain>(p);
    return of_part ? (blocks + of_part - 1) / of_part : blocks;
  }
  // Makes the last `count` units before `end` the CTA's part of the tile, as far as the tile and
  // the share have them.
  TEA_DEVICE void take(const KernelParams& p, int end, int64_t count) {
    if (const int of_part = part_blocks<kIsPlain>(p)) {
      item.end = min(end * of_part, item.blocks);
      item.first = (end - 1) * of_part;
      remaining = 0;
      return;
    }
    item.end = end;
    item.first = end < count ? 0 : end - static_cast<int>(count);
    remaining = count - (item.end - item.first);
  }
  // Moves to the part of the tile before. False: the share has no more.
  TEA_DEVICE bool next(const KernelParams& p) {
    if (remaining == 0) return false;
    item.tile -= p.tiles_at_once;
    if (item.tile < 0) {
      item.tile += p.tiles;
      int batch = item.batch;
      do enter_sequence(p, --batch);
      while (item.blocks == 0);
    }
    take(p, item.blocks, remaining);
    return true;
  }

  // count: units of all sequences, each for `groups` groups of tiles.
  TEA_DEVICE void divide(const KernelParams& p, int64_t count, int groups) {
    if (part_blocks<kIsPlain>(p))
      shares.blocks = shares.count = static_cast<int>(count * groups);
    else
      shares = Shares(kShape, count * groups, static_cast<int>(gridDim.x) / p.tiles_at_once);
    share = static_cast<int>(blockIdx.x) / p.tiles_at_once;
  }
  // The CTA's tile of a group.
  TEA_DEVICE int tile_of(const KernelParams& p, int group) const {
    return group * p.tiles_at_once + static_cast<int>(blockIdx.x) % p.tiles_at_once;
  }

  // Every sequence has the same length: the host knows it, or there is one sequence.
  TEA_DEVICE void start_uniform(const KernelParams& p) {
    const SequenceBounds bounds = is_uniform<kIsPlain>(p) ? p.bounds : bounds_of(p.args, 0);
    const int blocks = tile_blocks(kShape, bounds.seqlen_q, bounds.seqlen_kv);
    const int groups = p.tiles / p.tiles_at_once;
    const int of_tile = units(p, blocks);
    divide(p, p.args.batch * of_tile, groups);
    if (!has_work()) return;
    const int64_t begin = shares.begin(share), end = shares.begin(share + 1);
    const auto group = static_cast<int>(quotient(end - 1, of_tile));  // of those of all sequences
    item.bounds = bounds, item.blocks = blocks;
    item.batch = group / groups;
    item.tile = tile_of(p, group - item.batch * groups);
    take(p, static_cast<int>(end - int64_t{group} * of_tile), end - begin);
  }
  // Lengths are in device memory: a prefix sum over the sequences, of which each thread takes a
  // run.
  template <int kThreads>
  TEA_DEVICE void start_with_lengths(const KernelParams& p, SearchStorage& s) {
    const int batch = static_cast<int>(p.args.batch);
    const int groups = p.tiles / p.tiles_at_once;
    const int run = (batch + kThreads - 1) / kThreads;
    const int first = min(static_cast<int>(threadIdx.x) * run, batch);
    const auto units_of = [&](int b) {
      const SequenceBounds x = bounds_of(p.args, b);
      return int64_t{units(p, tile_blocks(kShape, x.seqlen_q, x.seqlen_kv))};
    };
    int64_t own = 0;
#pragma unroll 1
    for (int b = first; b < min(first + run, batch); ++b) own += units_of(b);
    int64_t before = own;  // of the threads of the warp up to this one
#pragma unroll 1
    for (int d = 1; d < 32; d *= 2) {
      const int64_t other = __shfl_up_sync(0xffffffff, before, d);
      if (lane() >= d) before += other;
    }
    if (lane() == 31) s.warp_blocks[warp()] = before;
    __syncthreads();
    int64_t all = 0;
    before -= own;
#pragma unroll 1
    for (int w = 0; w < kThreads / 32; ++w) {
      if (w < warp()) before += s.warp_blocks[w];
      all += s.warp_blocks[w];
    }
    divide(p, all, groups);
    if (!has_work()) return;
    const int64_t begin = shares.begin(share), end = shares.begin(share + 1);
    int64_t at = before * groups;  // where the thread's run begins
    if (end > at && end <= at + own * groups) {
      int b = first;
#pragma unroll 1
      for (; end > at + units_of(b) * groups; ++b) at += units_of(b) * groups;
      s.batch = b, s.group = static_cast<int>(quotient(end - 1 - at, units_of(b)));
      s.end = static_cast<int>(end - at - s.group * units_of(b));
    }
    __syncthreads();
    enter_sequence(p, s.batch);
    item.tile = tile_of(p, s.group);
    take(p, s.end, end - begin);
  }

  // Called by all threads of the CTA. `wait` waits for the predecessor grid, which may write
  // lengths.
  template <int kThreads, class Wait>
  TEA_DEVICE void start(const KernelParams& p, SearchStorage& s, Wait&& wait) {
    if (is_uniform<kIsPlain>(p)) start_uniform(p);
    wait();
    if (is_uniform<kIsPlain>(p)) return;
    if (p.args.batch == 1)
      start_uniform(p);
    else
      start_with_lengths<kThreads>(p, s);
  }
};

// -------------------------------------------------------------------------- tiles of several CTAs

// Whether a tile of a launch of `ctas` CTAs may have parts of several, as far as the host knows the
// lengths.
template <BlockShape kShape>
bool may_divide_tiles(const KernelParams& p, int ctas) {
  if (ctas == 1) return false;
  if (!p.args.is_uniform) return true;
  const int blocks = tile_blocks(kShape, p.bounds.seqlen_q, p.bounds.seqlen_kv);
  if (p.part_blocks) return blocks > p.part_blocks;
  const int64_t tiles = p.args.batch * (p.tiles / p.tiles_at_once);
  return tiles % Shares(kShape, blocks * tiles, ctas / p.tiles_at_once).count != 0;
}

// The slots of CTAs of lower numbers that a CTA adds: `adjacent` slots of the shares before its
// own, the last one first, then those of groups of shares, likewise.
struct OtherParts {
  int count = 0, adjacent = 0;
  int cta, last_group;   // the CTA's own number, and that of the last group's slot
  int step, group_step;  // from the slot of a share, or of a group of shares, to that of the next

  TEA_DEVICE int slot(int n) const;
};
TEA_DEVICE int OtherParts::slot(int n) const {
  return n < adjacent ? cta - (n + 1) * step : last_group - (n - adjacent) * group_step;
}

template <BlockShape kShape, bool kIsPlain>
TEA_DEVICE OtherParts find_other_parts(const KernelParams& p,
                                       const WorkCursor<kShape, kIsPlain>& work) {
  const int of_part = part_blocks<kIsPlain>(p);
  const WorkItem& item = work.item;
  if (item.begins_tile()) return {};
  int before, parts;  // of the tile: those before the CTA's, and all
  if (of_part) {
    before = item.first / of_part;
    parts = work.units(p, item.blocks);
  } else {
    const int64_t tile = work.tile_begin();
    const int first = work.shares.owner(tile);
    before = work.share - first;
    parts = work.shares.owner(tile + item.blocks - 1) - first + 1;
  }
  const bool two_levels = of_part || parts > kShape.max_parts + 1;
  const int in_group = before % kShape.group_parts, groups = before / kShape.group_parts;
  OtherParts others;
  others.cta = static_cast<int>(blockIdx.x), others.step = p.tiles_at_once;
  others.group_step = others.step * kShape.group_parts;
  others.last_group = others.cta - (in_group + 1) * others.step;
  if (!two_levels)
    others.adjacent = item.ends_tile() ? before : 0;
  else if (item.ends_tile())  // see BlockShape: the last CTA reads at most 12 slots instead of 22
    others.adjacent = of_part ? in_group : min(in_group, 1);
  else if (in_group == kShape.group_parts - 1 || (!of_part && before == parts - 2))
    others.adjacent = in_group;
  others.count = others.adjacent;
  if (two_levels && item.ends_tile()) others.count += groups;
  return others;
}

}  // namespace tea::hopper::decode
