// Decoding on sm_90a: few queries of each sequence over many keys, as fast as K and V can be read.
//
// A tile is a sequence and a head of K and V: the queries of all heads of its group are packed into
// its rows, so that K and V are read once. A persistent CTA has a share of the key blocks of all
// tiles. Each of its teams, one or several warps, loads and computes blocks of its own, independent
// of the other teams until the end of a work item.
#pragma once
#include "gpu/dependent_launch.cuh"
#include "hopper/decode/box_loader.cuh"
#include "hopper/decode/epilogue.cuh"
#include "hopper/decode/load_q.cuh"
#include "hopper/forward/zero_fill.cuh"

namespace tea::hopper::decode {

template <KernelConfig C>
struct DecodeKernel {
  using T = Traits<C>;
  using SharedStorage = typename T::SharedStorage;
  // Of 128 registers that each of 512 threads has at first, those that compute need more.
  static constexpr bool kMovesRegisters = T::kHasProducers && T::kAllThreads > 384;
  static constexpr int kProducerRegisters = 80, kConsumerRegisters = 176;

  // Zeroes the rows that belong to no sequence and reports invalid lengths and origins.
  static TEA_DEVICE void fill(const AttentionArguments& args) {
    if (T::kIsPlain || args.is_uniform) return;
    const int first = static_cast<int>(blockIdx.x * T::kThreads + threadIdx.x);
    ZeroFillWarps{args, first, static_cast<int>(gridDim.x) * T::kThreads}.run();
  }

  // Loads Q and what else an item needs. Called by all threads that compute; s.others is complete
  // when they have passed its barrier.
  static TEA_DEVICE void start_item(const KernelParams& p, SharedStorage& s, const QLoader<C>& q) {
    const WorkItem& item = s.work.item;
    q.load(s);
    if (!T::kIsPlain && p.args.alibi)
      for (int i = static_cast<int>(threadIdx.x); i < T::kBlockM; i += T::kThreads)
        s.slopes[i] = slope_of(p.args, item.batch, item.head_kv() * p.group + i % p.group);
    T::sync();
    if constexpr (C.scales_q()) convert_q<C>(s), T::sync();
  }
  // Called by the last thread that computes.
  static TEA_DEVICE void find_others(const LaunchParams& p, SharedStorage& s,
                                     const typename T::Cursor& work) {
    if (threadIdx.x == T::kThreads - 1) s.others = find_other_parts(p, work);
  }

  // A warp that loads the blocks of a team.
  static TEA_DEVICE void produce(const LaunchParams& p, SharedStorage& s,
                                 const typename T::Cursor& first) {
    if (T::kIsPlain || p.has_boxes) {
      // From the first lane, so that the compiler knows that all lanes have the same number.
      BoxLoader<C>{p, s, first, __shfl_sync(0xffffffff, warp(), 0) - T::kTeams}.run();
      return;
    }
    Loader<C> loader{p, first, warp() - T::kTeams};
    PipelineState<T::kStages> state;
    if (p.args.keys.form == TEA_PAGED) wait_on_dependent_grids();
    loader.start();
    wait_on_dependent_grids();
#pragma unroll 1
    while (loader.has_block) {
      wait(s.empty[loader.team][state.stage], state.parity ^ 1);
      loader.load(s.stages[loader.team][state.stage], s.full[loader.team][state.stage]);
      state.advance();
    }
  }
  // A team that loads its own blocks.
  static TEA_DEVICE void load_and_compute(const LaunchParams& p, SharedStorage& s,
                                          const typename T::Cursor& first) {
    const int team = warp() / T::kTeamWarps;
    Loader<C> loader{p, first, team};
    const auto load = [&](int stage) { loader.load(s.stages[team][stage], s.full[team][stage]); };
    wait_on_dependent_grids();
    loader.start();
#pragma unroll 1
    for (int i = 0; i < T::kStages; ++i) load(i);
    compute(p, s, first, load);
  }
  template <class Refill>
  static TEA_DEVICE void compute(const LaunchParams& p, SharedStorage& s,
                                 const typename T::Cursor& first, Refill&& refill) {
    Mainloop<C> mainloop{p, s};
    if (threadIdx.x == 0) s.work = first;
    find_others(p, s, first);
    QLoader<C> q;
    q.locate(p, first.item);
    T::sync();
    wait_on_dependent_grids();
    fill(p.args);
#pragma unroll 1
    for (;;) {
      start_item(p, s, q);
      mainloop.start_item();
      mainloop.run(refill);
      if (s.work.remaining == 0) break;
      Epilogue<C, false>{p, s, s.work.item, s.others}.run(mainloop);
      T::sync();  // all threads have read the item
      if (threadIdx.x == 0) s.work.next(p);
      T::sync();
      find_others(p, s, s.work);
      q.locate(p, s.work.item);
    }
    Epilogue<C, true>{p, s, s.work.item, s.others}.run(mainloop);
  }

  // The part that does not depend on the predecessor.
  static TEA_DEVICE void prepare(const LaunchParams& p, SharedStorage& s) {
    // The dependent grid starts when every CTA has called this. All CTAs of this grid then run, so
    // that none of those that another one waits for is still without an SM.
    launch_dependent_grids();
    if (threadIdx.x == 0) {
      if (T::kIsPlain || p.uses_tma) prefetch_tensor_map(p.k), prefetch_tensor_map(p.v);
      for (int i = 0; i < T::kTeams * T::kStages; ++i)
        init(s.full[i / T::kStages][i % T::kStages], Loader<C>::kArrivals);
      if constexpr (T::kHasProducers)
        for (int i = 0; i < T::kTeams * T::kStages; ++i)
          init(s.empty[i / T::kStages][i % T::kStages], 1);
      fence_barrier_init();
    }
    clear_slabs<C>(p, s);
    read_parameters(p, s);
    __syncthreads();
  }
  // No cache has the parameters of a launch yet: reads a word of each line, so that later reads do
  // not wait for one line after the other.
  static TEA_DEVICE void read_parameters(const LaunchParams& p, SharedStorage& s) {
    constexpr int kLineWords = 16, kWords = sizeof(LaunchParams) / 4, kWarps = T::kAllThreads / 32;
    uint32_t read = 0;
#pragma unroll
    for (int first = 0; first < kWords; first += kWarps * kLineWords)
      read |= reinterpret_cast<const uint32_t*>(&p)[min(first + warp() * kLineWords, kWords - 1)];
    if (lane() == 0) s.read_parameters[warp()] = read;
  }

  static TEA_DEVICE void run(const LaunchParams& p) {
    extern __shared__ __align__(1024) uint8_t memory[];
    SharedStorage& s = *reinterpret_cast<SharedStorage*>(memory);
    prepare(p, s);
    typename T::Cursor work;
    // The position among tiles of equal lengths is known before the wait, as are the first
    // addresses.
    work.start<T::kAllThreads>(p, s.search, [&] {
      if (!is_uniform<T::kIsPlain>(p)) wait_on_dependent_grids();
    });
    const bool computes = threadIdx.x < T::kThreads;
    if (!work.has_work()) {
      wait_on_dependent_grids();
      if (computes) fill(p.args);
    } else if constexpr (!T::kHasProducers) {
      load_and_compute(p, s, work);
    } else if (!computes) {
      if constexpr (kMovesRegisters) warpgroup_reg_dealloc<kProducerRegisters>();
      produce(p, s, work);
    } else {
      if constexpr (kMovesRegisters) warpgroup_reg_alloc<kConsumerRegisters>();
      compute(p, s, work, [&](int stage) {
        if (lane() == 0) arrive(s.empty[warp()][stage]);
      });
    }
  }
};

// The configuration and the type are plain integers and enumerators here: see
// forward/kernel.cuh.
template <int kTile, Type kType, bool kHasFp8Kv, bool kIsPlain = false>
inline constexpr KernelConfig kKernelConfig{kHasFp8Kv ? kFp8KvTiles[kTile] : kTiles[kTile], kType,
                                            kHasFp8Kv, kIsPlain};

template <int kTile, Type kType, bool kHasFp8Kv, bool kIsPlain>
__global__ void __launch_bounds__(kKernelConfig<kTile, kType, kHasFp8Kv, kIsPlain>.tile.threads(),
                                  1) decode_kernel(const __grid_constant__ LaunchParams p) {
  DecodeKernel<kKernelConfig<kTile, kType, kHasFp8Kv, kIsPlain>>::run(p);
}

}  // namespace tea::hopper::decode
