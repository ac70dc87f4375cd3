// Multi-head latent attention at decoding on sm_90a.
//
// A tile is 64 packed rows of a sequence and a head of K and V. A persistent CTA has a share of the
// key blocks of all tiles (scheduler.cuh); the tiles of a sequence are at about the same keys at
// the same time, so that all but one find K in L2. A CTA has a producer warpgroup and two
// consumer warpgroups.
#pragma once
#include "gpu/dependent_launch.cuh"
#include "hopper/decode/mla/epilogue.cuh"
#include "hopper/forward/zero_fill.cuh"

namespace tea::hopper::decode::mla {

template <Type kType, bool kSharedKvBoxes>
struct Kernel {
  // Zeroes the rows that belong to no sequence and reports invalid lengths and origins. Called by
  // consumer threads.
  static TEA_DEVICE void fill(const AttentionArguments& args) {
    if (args.is_uniform) return;
    const int first = static_cast<int>(blockIdx.x * kConsumerThreads + threadIdx.x);
    ZeroFillWarps{args, first, static_cast<int>(gridDim.x) * kConsumerThreads}.run();
  }

  static TEA_DEVICE void consume(const LaunchParams& p, SharedStorage& s,
                                 const WorkCursor<kBlockShape>& first) {
    Mainloop<kType, kSharedKvBoxes> mainloop{p, s};
    if (threadIdx.x == 0) s.work = first;
    sync_consumers();
    fill(p.args);
#pragma unroll 1
    for (;;) {
      load_q(p, s);
      sync_consumers();
      mainloop.start_item();
      mainloop.run();
      Epilogue<kType, kSharedKvBoxes>{p, s, s.work.item, mainloop}.run();
      if (s.work.remaining == 0) break;
      sync_consumers();  // all threads have read the item
      if (threadIdx.x == 0) s.work.next(p);
      sync_consumers();
    }
    if (p.divided_tiles && threadIdx.x == 0) write_divided_tile(p, s.work);
  }
  // The item is the CTA's last one, the only one that may be the end of a divided tile.
  static TEA_DEVICE void write_divided_tile(const LaunchParams& p,
                                            const WorkCursor<kBlockShape>& work) {
    const WorkItem& item = work.item;
    const int cta = static_cast<int>(blockIdx.x);
    DividedTile tile = {};
    if (item.ends_tile() && !item.begins_tile())
      tile = {item.batch, item.tile, cta, find_other_parts(p, work).count + 1};
    p.divided_tiles[cta] = tile;
  }

  // The part that does not depend on the predecessor.
  static TEA_DEVICE void prepare(const LaunchParams& p, SharedStorage& s) {
    launch_dependent_grids();  // see decode/kernel.cuh
    if (threadIdx.x == 0) {
      if (!gathers<kSharedKvBoxes>(p) && p.args.k.data) prefetch_tensor_map(p.k);
      if (!gathers<kSharedKvBoxes>(p) && !shares_kv<kSharedKvBoxes>(p) && p.args.v.data)
        prefetch_tensor_map(p.v);
      for (int i = 0; i < 2 * kSlabs; ++i) {
        init(s.full[i / kSlabs][i % kSlabs], gathers<kSharedKvBoxes>(p) ? kProducerThreads : 1);
        init(s.empty[i / kSlabs][i % kSlabs], 4);  // the warps of a consumer
      }
      fence_barrier_init();
    }
    __syncthreads();
  }

  static TEA_DEVICE void run(const LaunchParams& p) {
    extern __shared__ __align__(1024) uint8_t memory[];
    SharedStorage& s = *reinterpret_cast<SharedStorage*>(memory);
    prepare(p, s);
    WorkCursor<kBlockShape> work;
    work.start<kThreads>(p, s.search, wait_on_dependent_grids);
    const bool is_producer = threadIdx.x >= kConsumerThreads;
    if (!work.has_work()) {
      if (!is_producer) fill(p.args);
      if (p.divided_tiles && threadIdx.x == 0) p.divided_tiles[blockIdx.x] = {};
    } else if (is_producer) {
      warpgroup_reg_dealloc<kProducerRegisters>();
      Loader<kSharedKvBoxes>{p, s}.run(work);
    } else {
      warpgroup_reg_alloc<kConsumerRegisters>();
      consume(p, s, work);
    }
  }
};

template <Type kType, bool kSharedKvBoxes>
__global__ void __launch_bounds__(kThreads, 1)
    mla_decode_kernel(const __grid_constant__ LaunchParams p) {
  Kernel<kType, kSharedKvBoxes>::run(p);
}

}  // namespace tea::hopper::decode::mla
