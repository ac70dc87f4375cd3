// The shapes of a forward kernel and its shared memory.
#pragma once
#include "portable/device/mma.cuh"
#include "portable/forward/config.h"

namespace tea::portable {

template <KernelConfig C>
struct Traits {
  static constexpr int kDtype = C.dtype, kDim = C.tile.dim, kDimV = C.tile.dim_v;
  static constexpr int kMmaM = C.tile.mma_m, kBlockM = C.tile.block_m(), kBlockN = C.tile.block_n;
  static constexpr int kThreads = 32 * C.tile.warps_m * C.tile.warps_n;
  static constexpr int kWarpDimV = kDimV / C.tile.warps_n;  // columns of O of a warp
  static constexpr int kBytes = kElementBytes<kDtype>;
  static_assert(kDimV <= kDim, "O is stored through the shared memory of Q");
  static_assert(kBlockM % (kThreads / 8) == 0 || kThreads / 8 > kBlockM);

  using QkTile = SharedTile<kDtype, kDim>;
  using VoTile = SharedTile<kDtype, kDimV>;
  using Scores = float[kMmaM][kBlockN / 8][4];
  using Output = float[kMmaM][kWarpDimV / 8][4];

  struct SharedStorage {
    alignas(128) uint8_t q[kBlockM * kDim * kBytes];
    alignas(128) uint8_t k[kBlockN * kDim * kBytes];
    alignas(128) uint8_t v[kBlockN * kDimV * kBytes];
  };
  static_assert(sizeof(SharedStorage) <= 99 * 1024, "the limit of a CTA on sm_86 and sm_89");
};

template <KernelConfig C>
struct SharedTiles {
  typename Traits<C>::QkTile q, k;
  typename Traits<C>::VoTile v;

  TEA_DEVICE explicit SharedTiles(typename Traits<C>::SharedStorage& s)
      : q{shared_address(s.q)}, k{shared_address(s.k)}, v{shared_address(s.v)} {}
};

}  // namespace tea::portable
