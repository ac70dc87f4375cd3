// The backward kernel on sm_90a for 16-bit types: a persistent kernel whose tiles are 128 keys of
// one key head and all query rows that attend to them, 64 keys for each of two consumer warpgroups.
//
//   load warp          K V, then Q and dO of each step
//   consumers          S dP | P, dS | dV | dQ dK | ...     mainloop.cuh has the products
//   store warps        add dQ of each step to global memory, in the order of the key blocks, and dV
//                      and dK if several tiles share a key block
//   postprocess warps  convert rows of dQ that are complete to its type
#pragma once
#include "hopper/backward/mainloop.cuh"
#include "hopper/backward/postprocess.cuh"
#include "hopper/backward/scheduler.cuh"
#include "hopper/backward/store_warp.cuh"

namespace tea::hopper::backward {

template <KernelConfig C>
struct BackwardKernel {
  using T = Traits<C>;
  using SharedStorage = typename T::SharedStorage;

  // Registers per thread. The launch gives each of the four warpgroups 128.
  static constexpr int kServiceRegisters = 24, kConsumerRegisters = 232;

  enum Role { kLoadWarp, kSchedulerWarp, kFirstStoreWarp, kFirstPostprocessWarp = 4 };

  static TEA_DEVICE void init(const KernelParams& p, SharedStorage& s) {
    for (const TensorMap* map : {&p.q, &p.k, &p.v, &p.dout}) prefetch_tensor_map(*map);
    T::init_pipelines(s);
  }
  static TEA_DEVICE void run_service_warp(const KernelParams& p, SharedStorage& s, int warp) {
    if (warp == kLoadWarp) {
      if (elect_one()) LoadWarp<C>{p, s}.run();
    } else if (warp == kSchedulerWarp) {
      SchedulerWarp<C>{p, s}.run();
    } else if (warp < kFirstPostprocessWarp) {
      if (elect_one()) StoreWarp<C>{p, s, warp - kFirstStoreWarp}.run();
    } else if (warp < kFirstPostprocessWarp + T::kPostprocessWarps) {
      PostprocessWarp<C>{p, s, warp - kFirstPostprocessWarp}.run();
    }
  }
  static TEA_DEVICE void run(const KernelParams& p) {
    extern __shared__ __align__(1024) uint8_t memory[];
    SharedStorage& s = *reinterpret_cast<SharedStorage*>(memory);
    if (threadIdx.x == 0) init(p, s);
    if (threadIdx.x < 8) T::init_selectors(s, threadIdx.x);
    if (T::kColumnsOfK > T::kDim || T::num_slabs(p.args.dim_qk) < T::kSlabs ||
        T::num_slabs(p.args.dim_v) < T::kSlabs)
      zero_operands<C>(s);
    __syncthreads();
    // With `per_chunk` the scheduler warp waits for the flags of each tile's heads instead, and the
    // preprocess kernel sets counters and flags to zero before it lets this grid start.
    if (!p.tasks.per_chunk) wait_on_dependent_grids();
    const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
    constexpr int kServiceWarpgroups = T::kServiceThreads / 128;
    if (warpgroup < kServiceWarpgroups) {
      warpgroup_reg_dealloc<kServiceRegisters>();
      run_service_warp(p, s, __shfl_sync(0xffffffff, threadIdx.x / 32, 0));
    } else {
      warpgroup_reg_alloc<kConsumerRegisters>();
      Mainloop<C>{p, s, warpgroup - kServiceWarpgroups}.run();
    }
  }
};

// Integers and enumerators as template arguments: see forward/kernel.cuh.
template <int kTile, Type kType>
inline constexpr KernelConfig kKernelConfig{kTiles[kTile], kType};

template <int kTile, Type kType>
__global__ void __launch_bounds__(Traits<kKernelConfig<kTile, kType>>::kThreads, 1)
    backward_kernel(const __grid_constant__ KernelParams p) {
  BackwardKernel<kKernelConfig<kTile, kType>>::run(p);
}

}  // namespace tea::hopper::backward
