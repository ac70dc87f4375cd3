// The scheduler warp: finds the CTA's tiles and publishes their descriptors to the other roles.
//
// The tiles of a head are numbered in the order in which they contribute to dQ, ascending or
// descending by key blocks, and CTAs take tiles in ascending order of their numbers, the first one
// included: a tile whose number depended on its CTA would be missing while other kernels keep that
// CTA from running. A tile waits only for tiles of lower numbers, which a running CTA has taken:
// those of the same head that contribute to dQ before it, those of the same key block with earlier
// parts of the key head, whose parts have one order, and all tiles of the head whose memory for
// sums of dQ its head uses again. The unfinished tile with the lowest number never waits for a
// tile, so that ordered accumulation cannot deadlock. What it may wait for besides always ends: the
// preprocess kernel, all of whose CTAs run before the first CTA of this one starts, and the
// postprocess warps, which wait for completed units alone.
#pragma once
#include "gpu/dependent_launch.cuh"
#include "hopper/backward/shared_memory.cuh"
#include "hopper/device/ordered_sum.cuh"

namespace tea::hopper::backward {

template <KernelConfig C>
struct SchedulerWarp {
  using T = Traits<C>;

  const KernelParams& p;
  typename T::SharedStorage& s;
  PipelineState<2> work_state{};
  SequenceGroupSearch groups{};

  TEA_DEVICE int enter_window(int batch) {
    const int keys = bounds_of<T::kBlockM>(p, batch).keys;
    s.window[batch % 32] = keys;
    return (keys + kBlockN - 1) / kBlockN;
  }
  // TileOrder begins with the largest number of a block.
  TEA_DEVICE TileIndex tile_of(const tea::hopper::TileIndex& found, int blocks) const {
    const bool descending = p.is_descending(found.batch, found.head);
    return {descending ? found.row_block : blocks - 1 - found.row_block, found.head, found.batch};
  }
  // Called by all lanes, with numbers that never decrease. Returns false beyond the last tile.
  TEA_DEVICE bool find(int number, TileIndex& t) {
    tea::hopper::TileIndex found;
    if (p.args.keys.form == TEA_DENSE) {
      if (number >= p.order.count()) return false;
      found = p.order.at(number, p.divisors);
      t = tile_of(found, p.order.row_blocks);
      return true;
    }
    if (!find_in_sequences(number, found)) return false;
    __syncwarp();  // the window was written by other lanes
    t = tile_of(found, (s.window[found.batch % 32] + kBlockN - 1) / kBlockN);
    return true;
  }
  // The same where sequences have lengths of their own. One sequence at once may have more heads
  // than should be interleaved.
  TEA_DEVICE bool find_in_sequences(int number, tea::hopper::TileIndex& found) {
    const int sequences = static_cast<int>(p.args.batch), heads = p.order.heads;
    const int together = p.order.sequences_at_once();
    if (together > 1)
      return groups.find(
          number, sequences, p.divisors.heads, together,
          [&](int batch) { return enter_window(batch); }, found);
    int sequence, rest;
    if (!groups.search.find(
            number, sequences, [&](int batch) { return enter_window(batch) * heads; }, sequence,
            rest))
      return false;
    __syncwarp();
    const int blocks = (s.window[sequence % 32] + kBlockN - 1) / kBlockN;
    found = TileOrder{blocks, heads, 1, min(heads, p.order.heads_at_once), true}.at(rest);
    found.batch = sequence;
    return true;
  }
  TEA_DEVICE void publish() {
    if (lane() == 0) arrive(s.work.pipeline.full[work_state.stage]);
    work_state.advance();
  }
  // Waits until the row terms of a tile's heads have been written. The votes keep the warp
  // converged: otherwise ptxas uses no uniform registers, and spills.
  TEA_DEVICE void wait_for_terms(const SequenceBounds& bounds, const TileIndex& t) {
    const int head = t.head * p.heads_per_tile;
    const uint32_t* const rows_done =
        p.work.terms_written + p.tasks.task_of(t.batch, head, bounds.row_block);
    const int needed = tasks_with_terms(bounds.rows, T::kBlockM);
#pragma unroll 1
    for (int at = 0; at < needed; at += 128)
      while (!__all_sync(0xffffffff, are_complete(rows_done + min(at + 4 * lane(), needed - 4)))) {
      }
    fence_acq_rel_gpu();
    fence_proxy_async_global();  // the load warp reads the terms by bulk copies
    __syncwarp();                // lane 0 publishes what all lanes have seen
  }
  static TEA_DEVICE bool are_complete(const uint32_t* rows_done) {
    const uint4 x = load_relaxed_x4(rows_done);
    return TermRounds::is_complete(x.x & x.y & x.z & x.w);
  }
  // Sequences of invalid metadata may share row blocks, and so the words that count their rows.
  TEA_DEVICE bool are_sequences_valid() const {
    bool valid = true;
    for (int i = lane(); i < static_cast<int>(p.args.batch); i += 32)
      valid = valid && sequence_of(p.args.queries, i).valid && sequence_of(p.args.keys, i).valid;
    return __all_sync(0xffffffff, valid);
  }
  // Publishes a tile and returns true, unless no row attends to its keys.
  TEA_DEVICE bool publish(const TileIndex& t, bool waits_for_terms) {
    s.work.pipeline.producer_acquire(work_state);
    const SequenceBounds bounds = bounds_of<T::kBlockM>(p, t.batch);
    if (t.key_block * kBlockN >= bounds.keys) return false;
    if (waits_for_terms) wait_for_terms(bounds, t);
    if (lane() == 0) describe<T::kBlockM>(s.work.slot[work_state.stage], p, bounds, t);
    publish();
    return true;
  }
  // The next number that no CTA has taken.
  TEA_DEVICE int fetch() {
    int number = 0;
    if (lane() == 0) number = static_cast<int>(fetch_add(*p.work.next_tile, 1));
    return __shfl_sync(0xffffffff, number, 0);
  }
  // In place of the store warps, for a number without a tile.
  TEA_DEVICE void finish_without_tile() {
    if (lane() == 0) add_release(*p.work.completed.finished, T::kStoreWarps);
  }
  TEA_DEVICE void run() {
    // Otherwise for the whole preprocess kernel, here or, without `per_chunk`, at the start.
    const bool waits_for_terms = p.tasks.per_chunk && (!p.tasks.per_block || are_sequences_valid());
    if (p.tasks.per_chunk && !waits_for_terms) wait_on_dependent_grids();
    int number = fetch();
    uint32_t parity = 0;
    TileIndex t;
    while (find(number, t)) {
      // The next number is fetched as late as possible: a tile that waits in this CTA while another
      // one takes its successor would make that CTA wait.
      if (publish(t, waits_for_terms)) {
        wait(s.all_loads_issued, parity);
        parity ^= 1;
      } else {
        finish_without_tile();
      }
      number = fetch();
    }
    finish_without_tile();
    if (lane() == 0) arrive(s.no_more_tiles);
    if (p.tasks.per_chunk) wait_on_dependent_grids();
    launch_dependent_grids();
    s.work.pipeline.producer_acquire(work_state);
    if (lane() == 0) s.work.slot[work_state.stage].head_kv = -1;  // tells all roles to stop
    publish();
  }
};

}  // namespace tea::hopper::backward
