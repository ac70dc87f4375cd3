// The forward kernel on sm_90a for 16-bit types: FlashAttention-3 (Shah et al., 2024) as a
// persistent kernel. A tile is block_m query rows of one head, 64 for each consumer warpgroup.
//
//   load warp    K3 Q | K2 V3 | K1 V2 | K0 V1 | V0 | K3 Q of the next tile
//   consumer 0   S3    | S2 and O += P3 V3, softmax 2 | S1 and O += P2 V2, softmax 1 | ...
//   consumer 1           S3 | ... half an iteration later: one consumer uses the tensor cores while
//                the other computes its softmax (ping-pong)
#pragma once
#include "hopper/forward/mainloop.cuh"
#include "hopper/forward/scheduler.cuh"
#include "hopper/forward/zero_fill.cuh"

namespace tea::hopper {

// In load_pages.cuh, which the source files of the paged variants include.
template <KernelConfig C, bool kIsV>
struct PagedLoadWarp;

template <KernelConfig C>
struct ForwardKernel {
  using T = Traits<C>;
  using SharedStorage = typename T::SharedStorage;

  // Registers per thread. The launch gives each of the 1 + kConsumers warpgroups an equal share of
  // 64K; the first one gives up what the consumers gain. The scheduler warp would spill below 32.
  static constexpr int kServiceRegisters = T::kConsumers == 2 ? 40 : 32;
  static constexpr int kConsumerRegisters = T::kConsumers == 4   ? 112
                                            : T::kConsumers == 3 ? 160
                                                                 : 232;

  // The warps of the first warpgroup; the zero-fill warps are those that remain. In the paged
  // variants the last one loads Q and V instead, and each warp fills with zeros when it has no
  // further tile.
  enum Role { kLoadWarp, kSchedulerWarp, kStoreWarp, kLoadWarpV };
  static constexpr int kFirstZeroFillWarp = C.tile.tma_store ? 3 : 2;
  static constexpr int kZeroFillThreads = 128 - 32 * kFirstZeroFillWarp;

  static TEA_DEVICE void init(const KernelParams& p, SharedStorage& s) {
    for (const TensorMap* map : {&p.q, &p.k, &p.v}) prefetch_tensor_map(*map);
    if (stores_by_tma<C>(p.args)) prefetch_tensor_map(p.o);
    if (C.bias() && p.bias_rows) prefetch_tensor_map(p.bias);
    T::init_pipelines(s);
  }

  // Whether the scheduler warp reads nothing from device memory, so that it need not wait for the
  // predecessor grid before it describes the first tile.
  static TEA_DEVICE bool tiles_are_known_on_host(const KernelParams& p) {
    return p.args.is_uniform && p.args.softmax != TEA_SOFTMAX_LEARNABLE && !C.general() &&
           !C.dropout();
  }

  // The first warpgroup. Consumers and the store warp need no wait for the predecessor grid: what
  // they read was loaded or described by a warp that has waited, and they write O and the row
  // statistics only after the first tile has been loaded.
  static TEA_DEVICE void run_service_warp(const KernelParams& p, SharedStorage& s, int warp) {
    if (warp == kLoadWarp) {
      wait_on_dependent_grids();
      if constexpr (C.paged())
        PagedLoadWarp<C, false>{p, s}.run();
      else if (elect_one())
        LoadWarp<C>{p, s}.run();
    } else if (warp == kSchedulerWarp) {
      if (!tiles_are_known_on_host(p)) wait_on_dependent_grids();
      SchedulerWarp<C>{p, s}.run();
    } else if (warp < kFirstZeroFillWarp) {
      if constexpr (C.tile.tma_store)
        if (elect_one()) StoreWarp<C>{p, s}.run();
    } else {
      wait_on_dependent_grids();
      const int thread = static_cast<int>(threadIdx.x) - 32 * kFirstZeroFillWarp;
      const int first = static_cast<int>(blockIdx.x) * kZeroFillThreads + thread;
      if (first == 0 && p.counter) p.counter->reset(p.launch_number);
      if constexpr (C.paged()) {
        if (warp == kLoadWarpV) PagedLoadWarp<C, true>{p, s}.run();
      } else {
        ZeroFillWarps{p.args, first, static_cast<int>(gridDim.x) * kZeroFillThreads}.run();
      }
    }
    if constexpr (C.paged()) {
      __syncwarp();
      wait_on_dependent_grids();
      const int first = static_cast<int>(blockIdx.x * 128 + threadIdx.x);
      ZeroFillWarps{p.args, first, static_cast<int>(gridDim.x) * 128}.run();
    }
  }

  static TEA_DEVICE void run(const KernelParams& p) {
    extern __shared__ __align__(1024) uint8_t memory[];
    SharedStorage& s = *reinterpret_cast<SharedStorage*>(memory);
    if (threadIdx.x == 0) init(p, s);
    if (T::num_slabs(p.args.dim_qk) < T::kDim / T::kSlabDim) zero_unused_slabs<C>(p, s);
    __syncthreads();
    const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
    if (warpgroup == 0) {
      warpgroup_reg_dealloc<kServiceRegisters>();
      run_service_warp(p, s, __shfl_sync(0xffffffff, threadIdx.x / 32, 0));
    } else {
      warpgroup_reg_alloc<kConsumerRegisters>();
      Mainloop<C>{p, s, warpgroup - 1}.run();
    }
  }
};

// The variant, the configuration and the type are plain integers and enumerators here. As one
// template argument of class type, GCC mangles a KernelConfig that was read from a constant array
// differently from nvcc, which registers the kernel; the launch would then fail with
// cudaErrorInvalidResourceHandle. tests/hopper/registered.py checks for that.
template <Variant kVariant, int kTile, Type kType>
inline constexpr KernelConfig kKernelConfig{tile_config(kTile, kVariant), kType, kVariant};

template <Variant kVariant, int kTile, Type kType>
__global__ void __launch_bounds__(Traits<kKernelConfig<kVariant, kTile, kType>>::kThreads, 1)
    forward_kernel(const __grid_constant__ KernelParams p) {
  ForwardKernel<kKernelConfig<kVariant, kTile, kType>>::run(p);
}

}  // namespace tea::hopper
