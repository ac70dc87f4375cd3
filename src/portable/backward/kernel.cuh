// The main backward kernel, for 16-bit types and FP8: FlashAttention-2 (Dao, 2023). A CTA keeps a
// block of K and V, and dK and dV in registers. It loops over the query tiles that attend to the
// block, of each query head of its KV head, and adds their dQ to fp32 sums in global memory.
//
//   load next Q, dO | S = Q K^T | P = exp(S - LSE) | dP = dO V^T | dS = P (dP - delta) | barrier
//   dV += P^T dO | dK += dS^T Q | dQ += dS K, by atomics | barrier
//
// preprocess.cu computes LSE and delta before it, and postprocess.cu dQ from the sums after it. dQ
// without atomics is in dq_kernel.cu. piecewise.cu computes dBias, and everything that does not fit
// here (fp32, head dimensions beyond the table, GPUs with little shared memory).
#pragma once
#include "portable/backward/epilogue.cuh"
#include "portable/backward/launch.cuh"
#include "portable/backward/mainloop.cuh"

namespace tea::portable {
namespace {

template <BackwardConfig C>
struct BackwardKernel {
  using T = BackwardTraits<C>;

  static TEA_DEVICE void run(const BackwardParams& p) {
    extern __shared__ __align__(128) uint8_t memory[];
    const BackwardWorkTile<C> tile =
        backward_work_tile<C>(p, *reinterpret_cast<typename T::SharedStorage*>(memory));
    const BackwardLoader<C> loader{tile};
    typename T::DkvGrid::Accumulator dk = {}, dv = {};
    const float ds_amax = BackwardMainloop<C>{tile, loader}.run(dk, dv);
    BackwardEpilogue<C>{tile}.run(dk, dv);
    if constexpr (T::kGeneral) update_amax_by_warp(p.work.args.fp8.dp_amax, ds_amax);
  }
};

// Integers as template arguments: see kKernelConfig in forward/kernel.cuh.
template <int kTile, int kDtype>
inline constexpr BackwardConfig kBackwardConfig = {kBackwardTiles[kTile], kDtype};

template <int kTile, int kDtype>
__global__ void __launch_bounds__(BackwardTraits<kBackwardConfig<kTile, kDtype>>::kThreads)
    backward_kernel(const __grid_constant__ BackwardParams p) {
  BackwardKernel<kBackwardConfig<kTile, kDtype>>::run(p);
}

template <int kTile, int kDtype>
struct BackwardLaunch {
  static void run(const BackwardArguments& work, cudaStream_t stream) {
    static OncePerDevice allowed;
    using T = BackwardTraits<kBackwardConfig<kTile, kDtype>>;
    const Launch how{"backward", {}, T::kThreads, sizeof(typename T::SharedStorage)};
    launch_tiles(how, backward_kernel<kTile, kDtype>, allowed, work, work.args.keys.max_seqlen,
                 T::kBlockN, work.args.heads_kv, stream);
  }
};

}  // namespace
}  // namespace tea::portable
