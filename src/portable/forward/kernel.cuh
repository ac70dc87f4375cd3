// The forward kernel on mma.sync: FlashAttention-2 (Dao, 2023).
//
// A CTA computes one tile of query rows of one head over the key blocks that its rows attend to,
// last block first. Shared memory holds the tile of Q, one block of K and one of V: the copy of V
// overlaps with S, the copy of the next K with the softmax and O.
//
//   cp.async  Q K3 | V3 | K2         | V2 | K1 ...
//   warps          | S3 | O += P3 V3 | S2 | O += P2 V2 ...
//
// A warp computes 16 * mma_m rows, and with several warps_n a part of the columns of O. While one
// CTA of an SM waits, another one computes.
//
// Head dimensions above 512: K and V pass through shared memory in pieces of their columns.
//
// Few queries: the heads of a GQA group may be packed into the rows of one tile, and keys may be
// split among CTAs, whose results combine.cu adds in a fixed order.
#pragma once
#include <type_traits>

#include "portable/forward/epilogue.cuh"
#include "portable/forward/piecewise_mainloop.cuh"

namespace tea::portable {

template <KernelConfig C>
struct ForwardKernel {
  using T = Traits<C>;
  using Loop = std::conditional_t<(T::kPieces > 1), PiecewiseMainloop<C>, Mainloop<C>>;

  static TEA_DEVICE void start(typename T::Output& o, OnlineSoftmax (&softmax)[T::kMmaM]) {
#pragma unroll
    for (int m = 0; m < T::kMmaM; ++m) {
      softmax[m].start();
#pragma unroll
      for (int n = 0; n < T::kWarpDimV / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) o[m][n][i] = 0;
    }
  }

  static TEA_DEVICE void run(const KernelParams& p) {
    extern __shared__ __align__(128) uint8_t memory[];
    const WorkTile<C> tile(p);
    const SharedTiles<C> shared(*reinterpret_cast<typename T::SharedStorage*>(memory));
    const TileLoader<C> loader{tile, shared};
    typename T::Output o;
    OnlineSoftmax softmax[T::kMmaM];
    start(o, softmax);
    const int rows = tile.valid_rows();
    const KeyBlocks blocks = tile.key_blocks(rows);
    float p_amax = 0;
    if (blocks.begin < blocks.end) {
      loader.load_q(rows);
      p_amax = Loop{tile, shared, loader}.run(o, softmax, blocks);
    }
    Epilogue<C>{tile, shared}.run(o, softmax, rows, p_amax);
  }
};

// The variant and the configuration are an enumerator and an integer here. As one template argument
// of class type, GCC mangles a KernelConfig that was read from a constant array differently from
// nvcc, which registers the kernel; the launch would then fail.
template <Variant kVariant, int kTile>
inline constexpr KernelConfig kKernelConfig = kernel_config(kTile, kVariant);

template <Variant kVariant, int kTile>
__global__ void __launch_bounds__(Traits<kKernelConfig<kVariant, kTile>>::kThreads,
                                  kKernelConfig<kVariant, kTile>.tile.ctas_per_sm)
    forward_kernel(const __grid_constant__ KernelParams p) {
  ForwardKernel<kKernelConfig<kVariant, kTile>>::run(p);
}

}  // namespace tea::portable
