// Which tiles a CTA computes. The key blocks of all tiles are divided into shares of equal size
// (Stream-K: Osama et al., 2023), so a CTA has a part of one tile, or the end of one, some whole
// tiles and the beginning of another. It computes them from the last to the first: see
// epilogue.cuh.
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
  int batch, head, end;
};

struct WorkCursor {
  Shares shares;
  int64_t remaining;  // blocks of the CTA's share before `item`
  WorkItem item;

  TEA_DEVICE bool has_work() const { return static_cast<int>(blockIdx.x) < shares.ctas; }
  // The number of the tile's first block among those of all tiles.
  TEA_DEVICE int64_t tile_begin() const {
    return shares.begin(static_cast<int>(blockIdx.x)) + remaining - item.first;
  }

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
    if (--item.head_kv < 0) {
      item.head_kv = p.args.heads_kv - 1;
      int batch = item.batch;
      do enter_sequence(p, --batch);
      while (item.blocks == 0);
    }
    take(item.blocks, remaining);
    return true;
  }

  // Every sequence has the same length, which the host knows.
  TEA_DEVICE void start_uniform(const KernelParams& p) {
    const int blocks = tile_blocks(p.bounds.seqlen_q, p.bounds.seqlen_kv);
    shares = Shares(p.args.batch * p.args.heads_kv * blocks, static_cast<int>(gridDim.x));
    if (!has_work()) return;
    const int cta = static_cast<int>(blockIdx.x);
    const int64_t begin = shares.begin(cta), end = shares.begin(cta + 1);
    const auto tile = static_cast<int>(quotient(end - 1, blocks));
    enter_sequence(p, tile / p.args.heads_kv);
    item.head_kv = tile - item.batch * p.args.heads_kv;
    take(static_cast<int>(end - int64_t{tile} * blocks), end - begin);
  }
  // Lengths are in device memory: a prefix sum over the sequences, of which each thread takes a
  // run.
  template <int kThreads>
  TEA_DEVICE void start_with_lengths(const KernelParams& p, SearchStorage& s) {
    const int batch = static_cast<int>(p.args.batch), heads = p.args.heads_kv;
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
    shares = Shares(all * heads, static_cast<int>(gridDim.x));
    if (!has_work()) return;
    const int cta = static_cast<int>(blockIdx.x);
    const int64_t begin = shares.begin(cta), end = shares.begin(cta + 1);
    int64_t at = before * heads;  // where the thread's run begins
    if (end > at && end <= at + own * heads) {
      int b = first;
#pragma unroll 1
      for (; end > at + blocks_of(b) * heads; ++b) at += blocks_of(b) * heads;
      s.batch = b, s.head = static_cast<int>(quotient(end - 1 - at, blocks_of(b)));
      s.end = static_cast<int>(end - at - s.head * blocks_of(b));
    }
    __syncthreads();
    enter_sequence(p, s.batch);
    item.head_kv = s.head;
    take(s.end, end - begin);
  }

  // Called by all threads of the CTA.
  template <int kThreads>
  TEA_DEVICE void start(const KernelParams& p, SearchStorage& s) {
    if (p.args.is_uniform)
      start_uniform(p);
    else
      start_with_lengths<kThreads>(p, s);
  }
};

// -------------------------------------------------------------------------- tiles of several CTAs

// The slots of CTAs of lower numbers that a CTA adds: `count` slots `step` apart, the last of which
// may be nearer.
struct OtherParts {
  int first, step, count, last;

  TEA_DEVICE int slot(int n) const { return min(first + n * step, last); }
};
// Where a tile has more parts than kMaxParts, they are added in two levels: of the CTAs before the
// one with the end of the tile, the last of each kGroupParts adds the parts of that group to its
// own.
inline constexpr int kMaxParts = 24, kGroupParts = 12;
static_assert(kMaxCtas <= kGroupParts * kGroupParts);

TEA_DEVICE OtherParts find_other_parts(const WorkCursor& work) {
  const WorkItem& item = work.item;
  if (item.begins_tile()) return {};
  const int64_t tile = work.tile_begin();
  const int cta = static_cast<int>(blockIdx.x), first = work.shares.owner(tile);
  const int last = work.shares.owner(tile + item.blocks - 1), before = cta - first;
  const bool two_levels = last - first > kMaxParts;
  if (item.ends_tile()) {
    if (!two_levels) return {first, 1, before, cta - 1};
    return {first + kGroupParts - 1, kGroupParts, (before + kGroupParts - 1) / kGroupParts,
            cta - 1};
  }
  const int in_group = before % kGroupParts;
  if (!two_levels || (in_group != kGroupParts - 1 && cta != last - 1)) return {};
  return {cta - in_group, 1, in_group, cta - 1};
}

}  // namespace tea::hopper::decode
