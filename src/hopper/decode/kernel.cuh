// Decoding on sm_90a: few queries of each sequence over many keys, as fast as K and V can be read.
//
// A tile is a sequence and a head of K and V: the queries of all heads of its group are packed into
// its rows, so that K and V are read once. A persistent CTA has a share of the key blocks of all
// tiles. Each of its teams, one or several warps, loads and computes blocks of its own, independent
// of the other teams until the end of a work item.
#pragma once
#include "gpu/dependent_launch.cuh"
#include "hopper/decode/epilogue.cuh"
#include "hopper/forward/zero_fill.cuh"

namespace tea::hopper::decode {

template <KernelConfig C>
struct DecodeKernel {
  using T = Traits<C>;
  using SharedStorage = typename T::SharedStorage;

  // Zeroes the rows that belong to no sequence and reports invalid lengths and origins.
  static TEA_DEVICE void fill(const AttentionArguments& args) {
    if (args.is_uniform) return;
    const int first = static_cast<int>(blockIdx.x * T::kThreads + threadIdx.x);
    ZeroFillWarps{args, first, static_cast<int>(gridDim.x) * T::kThreads}.run();
  }

  // Loads Q and what else an item needs. Called by all threads.
  static TEA_DEVICE void start_item(const KernelParams& p, SharedStorage& s) {
    const WorkItem& item = s.work.item;
    load_q<C>(p, s, item);
    if (p.args.alibi)
      for (int i = static_cast<int>(threadIdx.x); i < T::kBlockM; i += T::kThreads)
        s.slopes[i] = slope_of(p.args, item.batch, item.head_kv() * p.group + i % p.group);
    // Needed at the end of the item, but computed while K is on its way.
    if (threadIdx.x == T::kThreads - 1) s.others = find_other_parts(p, s.work);
    __syncthreads();
  }

  static TEA_DEVICE void compute(const LaunchParams& p, SharedStorage& s,
                                 const WorkCursor<kBlockShape>& first) {
    Mainloop<C> mainloop{p, s};
    Loader<C> loader{p, first, mainloop.team};
    loader.start();
#pragma unroll 1
    for (int i = 0; i < T::kStages; ++i)
      loader.load(s.stages[mainloop.team][i], s.full[mainloop.team][i]);
    if (threadIdx.x == 0) s.work = first;
    __syncthreads();
    fill(p.args);
#pragma unroll 1
    for (;;) {
      start_item(p, s);
      mainloop.start_item();
      mainloop.run(loader);
      if (s.work.remaining == 0) break;
      Epilogue<C, false>{p, s, s.work.item, s.others}.run(mainloop);
      __syncthreads();  // all threads have read the item
      if (threadIdx.x == 0) s.work.next(p);
      __syncthreads();
    }
    Epilogue<C, true>{p, s, s.work.item, s.others}.run(mainloop);
  }

  // The part that does not depend on the predecessor.
  static TEA_DEVICE void prepare(const LaunchParams& p, SharedStorage& s) {
    // The dependent grid starts when every CTA has called this. All CTAs of this grid then run, so
    // that none of those that another one waits for is still without an SM.
    launch_dependent_grids();
    if (threadIdx.x == 0) {
      if (p.uses_tma) prefetch_tensor_map(p.k), prefetch_tensor_map(p.v);
      for (int i = 0; i < T::kTeams * T::kStages; ++i)
        init(s.full[i / T::kStages][i % T::kStages], Loader<C>::kArrivals);
      fence_barrier_init();
    }
    clear_slabs<C>(p, s);
    __syncthreads();
  }

  static TEA_DEVICE void run(const LaunchParams& p) {
    extern __shared__ __align__(1024) uint8_t memory[];
    SharedStorage& s = *reinterpret_cast<SharedStorage*>(memory);
    prepare(p, s);
    WorkCursor<kBlockShape> work;
    work.start<T::kThreads>(p, s.search, wait_on_dependent_grids);
    if (work.has_work())
      compute(p, s, work);
    else
      fill(p.args);
  }
};

// The configuration and the type are plain integers and enumerators here: see
// forward/kernel.cuh.
template <int kTile, Type kType, bool kHasFp8Kv>
inline constexpr KernelConfig kKernelConfig{kHasFp8Kv ? kFp8KvTiles[kTile] : kTiles[kTile], kType,
                                            kHasFp8Kv};

template <int kTile, Type kType, bool kHasFp8Kv>
__global__ void __launch_bounds__(kKernelConfig<kTile, kType, kHasFp8Kv>.tile.threads(), 1)
    decode_kernel(const __grid_constant__ LaunchParams p) {
  DecodeKernel<kKernelConfig<kTile, kType, kHasFp8Kv>>::run(p);
}

}  // namespace tea::hopper::decode
