// Which tiles a CTA computes. The key blocks of all tiles are divided into shares of equal size
// (Stream-K: Osama et al., 2023), so a CTA has a part of one tile, or the end of one, some whole
// tiles and the beginning of another. It computes them from the last to the first: see
// epilogue.cuh. Each share has p.heads_at_once CTAs, for tiles of as many adjacent heads.
#pragma once
#include "hopper/decode/params.cuh"

namespace tea::hopper::decode {

// A CTA's part of a tile: the packed rows of a sequence and a head of K and V, over the key blocks
// [first, end) of the tile's `blocks`.
struct WorkItem {
  SequenceBounds bounds;
  int batch, head_kv;
  int first, end, blocks;

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
    item.bounds = p.args.is_uniform ? p.bounds : bounds_of(p.args, batch);
    item.blocks = tile_blocks(item.bounds.seqlen_q, item.bounds.seqlen_kv);
  }
  // Makes the last `count` blocks before `end` the CTA's part of the tile, as far as the tile and
  // the share have them.
  TEA_DEVICE void take(int end, int64_t count) {
    item.end = end;
    item.first = end < count ? 0 : end - static_cast<int>(count);
    remaining = count - (item.end - item.first);
  }
  // Moves to the part of the tile before. False: the share has no more.
  TEA_DEVICE bool next(const KernelParams& p) {
    if (remaining == 0) return false;
    item.head_kv -= p.heads_at_once;
    if (item.head_kv < 0) {
      item.head_kv += p.args.heads_kv;
      int batch = item.batch;
      do enter_sequence(p, --batch);
      while (item.blocks == 0);
    }
    take(item.blocks, remaining);
    return true;
  }

  // blocks: of all sequences, each for `groups` groups of heads.
  TEA_DEVICE void divide(const KernelParams& p, int64_t blocks, int groups) {
    shares = Shares(blocks * groups, static_cast<int>(gridDim.x) / p.heads_at_once);
    share = static_cast<int>(blockIdx.x) / p.heads_at_once;
  }
  // The CTA's head of a group.
  TEA_DEVICE int head_of(const KernelParams& p, int group) const {
    return group * p.heads_at_once + static_cast<int>(blockIdx.x) % p.heads_at_once;
  }

  // Every sequence has the same length: the host knows it, or there is one sequence.
  TEA_DEVICE void start_uniform(const KernelParams& p) {
    const SequenceBounds bounds = p.args.is_uniform ? p.bounds : bounds_of(p.args, 0);
    const int blocks = tile_blocks(bounds.seqlen_q, bounds.seqlen_kv);
    const int groups = p.args.heads_kv / p.heads_at_once;
    divide(p, p.args.batch * blocks, groups);
    if (!has_work()) return;
    const int64_t begin = shares.begin(share), end = shares.begin(share + 1);
    const auto tile = static_cast<int>(quotient(end - 1, blocks));
    item.bounds = bounds, item.blocks = blocks;
    item.batch = tile / groups;
    item.head_kv = head_of(p, tile - item.batch * groups);
    take(static_cast<int>(end - int64_t{tile} * blocks), end - begin);
  }
  // Lengths are in device memory: a prefix sum over the sequences, of which each thread takes a
  // run.
  template <int kThreads>
  TEA_DEVICE void start_with_lengths(const KernelParams& p, SearchStorage& s) {
    const int batch = static_cast<int>(p.args.batch);
    const int groups = p.args.heads_kv / p.heads_at_once;
    const int run = (batch + kThreads - 1) / kThreads;
    const int first = min(static_cast<int>(threadIdx.x) * run, batch);
    const auto blocks_of = [&](int b) {
      const SequenceBounds x = bounds_of(p.args, b);
      return int64_t{tile_blocks(x.seqlen_q, x.seqlen_kv)};
    };
    int64_t own = 0;
#pragma unroll 1
    for (int b = first; b < min(first + run, batch); ++b) own += blocks_of(b);
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
      for (; end > at + blocks_of(b) * groups; ++b) at += blocks_of(b) * groups;
      s.batch = b, s.group = static_cast<int>(quotient(end - 1 - at, blocks_of(b)));
      s.end = static_cast<int>(end - at - s.group * blocks_of(b));
    }
    __syncthreads();
    enter_sequence(p, s.batch);
    item.head_kv = head_of(p, s.group);
    take(s.end, end - begin);
  }

  // Called by all threads of the CTA.
  template <int kThreads>
  TEA_DEVICE void start(const KernelParams& p, SearchStorage& s) {
    if (p.args.is_uniform || p.args.batch == 1)
      start_uniform(p);
    else
      start_with_lengths<kThreads>(p, s);
  }
};

// -------------------------------------------------------------------------- tiles of several CTAs

// The slots of CTAs of lower numbers that a CTA adds: `count` slots, each `step` after the one
// before it, but none after `last`, which is the slot of the preceding share.
struct OtherParts {
  int first, step, count, last;

  TEA_DEVICE int slot(int n) const { return min(first + n * step, last); }
};
// Where a tile has more parts than kMaxParts, they are added in two levels: of the CTAs before the
// one with the end of the tile, the last of each kGroupParts adds the parts of that group to its
// own.
inline constexpr int kMaxParts = 24, kGroupParts = 12;
static_assert(kMaxCtas <= kGroupParts * kGroupParts);

TEA_DEVICE OtherParts find_other_parts(const KernelParams& p, const WorkCursor& work) {
  const WorkItem& item = work.item;
  if (item.begins_tile()) return {};
  const int64_t tile = work.tile_begin();
  const int first = work.shares.owner(tile), before = work.share - first;
  const int last = work.shares.owner(tile + item.blocks - 1);
  const bool two_levels = last - first > kMaxParts;
  // From `from` on, every `step`th share before that of the CTA.
  const auto parts = [&](int from, int step, int count) -> OtherParts {
    const auto cta = static_cast<int>(blockIdx.x);
    return {cta - (work.share - from) * p.heads_at_once, step * p.heads_at_once, count,
            cta - p.heads_at_once};
  };
  if (item.ends_tile()) {
    if (!two_levels) return parts(first, 1, before);
    return parts(first + kGroupParts - 1, kGroupParts, (before + kGroupParts - 1) / kGroupParts);
  }
  const int in_group = before % kGroupParts;
  if (!two_levels || (in_group != kGroupParts - 1 && work.share != last - 1)) return {};
  return parts(work.share - in_group, 1, in_group);
}

}  // namespace tea::hopper::decode
