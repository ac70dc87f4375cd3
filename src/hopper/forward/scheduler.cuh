// The scheduler warp: finds the CTA's tiles and publishes their descriptors to the other roles.
#pragma once
#include "gpu/dependent_launch.cuh"
#include "hopper/forward/forward.h"
#include "hopper/forward/page_box.cuh"
#include "hopper/forward/shared_memory.cuh"
#include "hopper/forward/tile_finder.cuh"

namespace tea::hopper {

static_assert(sizeof(TileCounter) == kTileCounterBytes && alignof(TileCounter) == 8);

template <KernelConfig C>
struct SchedulerWarp {
  using T = Traits<C>;
  using Tiles = TileFinder<T::kBlockM, C.masked()>;
  // Rounds of tiles, at the end of a launch, whose numbers are fetched as late as possible.
  static constexpr int kLateRounds = 6;

  const KernelParams& p;
  typename T::SharedStorage& s;
  // Read at the start: later the register would have to be reloaded through a cold constant cache.
  const int num_ctas = static_cast<int>(gridDim.x);
  const int guaranteed_tiles = Tiles::guaranteed_tiles(p.args, p.order);
  PipelineState<2> work_state{};
  PipelineState<1> load_state{};  // of nearly_loaded

  // Writes the next descriptor, by one thread.
  TEA_DEVICE void describe_next(const TileIndex& t) {
    WorkTile& w = s.next;
    const bool searched = p.args.queries.form != TEA_DENSE;
    SequenceBounds bounds = p.args.is_uniform ? p.bounds
                            : searched        ? s.window[t.batch % 32]
                                              : bounds_of(p.args, t.batch);
    if constexpr (C.paged()) align_to_boxes(bounds, 1 << p.box_rows_log2);
    describe<T::kBlockM, T::kBlockN>(w, p.args, bounds, p.heads_per_kv, t);
    if constexpr (C.tile.staggered) describe_consumer_blocks<T::kBlockM, T::kBlockN>(w);
    if constexpr (C.general() || C.dropout()) describe_origin(w, p.args);
    if constexpr (C.general()) describe_score_mod(w, p.args);
    if constexpr (C.dropout()) describe_dropout(w, p.args);
  }
  // Copies the next descriptor to the queue, by one thread. It was written elsewhere so that it is
  // ready when a slot becomes free.
  TEA_DEVICE void publish_next() {
    constexpr bool kAll = C.tile.staggered || C.general() || C.dropout();
    constexpr size_t kBytes = kAll ? sizeof(WorkTile) : sizeof(WorkTileBase);
    auto* const to = reinterpret_cast<uint4*>(&s.work.acquire(work_state));
    const auto* const from = reinterpret_cast<const uint4*>(&s.next);
#pragma unroll 2  // more would spill
    for (int i = 0; i < static_cast<int>((kBytes + 15) / 16); ++i) to[i] = from[i];
    s.work.publish(work_state);
  }
  // A number that is fetched long before its tile can begin waits in this CTA, while other CTAs may
  // have run out of tiles; one that is fetched later may not be described and loaded in time to
  // hide behind the tile before. Numbers are therefore fetched when the tile before has been loaded
  // up to kFetchLead blocks. Tiles that have no more blocks than that are too short to wait for,
  // and the load warps of pages give no signal: numbers are then fetched at once while tiles remain
  // for all CTAs, and after tiles of at most one block, but at the end of a launch only when the
  // queue has room for the descriptor.
  TEA_DEVICE void wait_before_fetch(int number) {
    const int length = s.next.blocks.end - s.next.blocks.begin;
    if (length > T::kFetchLead && !C.paged()) {
      wait(s.nearly_loaded, load_state.parity);
      load_state.advance();
    } else if (length > 1 && number + kLateRounds * num_ctas >= guaranteed_tiles) {
      s.work.pipeline.producer_acquire(work_state);
    }
  }
  // Before the first fetch: until the predecessor has finished, the counter is its memory.
  TEA_DEVICE void open(TileCounter& counter) {
    wait_on_dependent_grids();
    counter.wait_for_reset(p.launch_number);
  }
  // The number of the tile after tile `number`, by one thread.
  TEA_DEVICE int next_number(int number) {
    TileCounter* const counter = p.counter;
    if (!counter) return num_ctas + number;
    if (number < num_ctas) open(*counter);
    wait_before_fetch(number);
    return num_ctas + counter->fetch();
  }
  TEA_DEVICE void run() {
    Tiles tiles{p.args, p.order, p.divisors, s.window};
    int number = static_cast<int>(blockIdx.x);
    TileIndex t;
    while (tiles.find(number, t)) {
      __syncwarp();  // lane 0 reads the window, which other lanes have written
      if (lane() == 0) {
        describe_next(t);
        publish_next();
        number = next_number(number);
      }
      number = __shfl_sync(0xffffffff, number, 0);
    }
    if (lane() > 0) return;
    launch_dependent_grids();
    s.next.head = -1;  // tells all roles to stop
    publish_next();
    if (TileCounter* const counter = p.counter) {
      if (number < num_ctas) open(*counter);
      counter->retire();
    }
  }
};

}  // namespace tea::hopper
