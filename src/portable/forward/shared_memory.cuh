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
  // Columns of K and of V in shared memory at a time, and those of V that belong to one warp.
  static constexpr int kPieces = C.tile.pieces();
  static constexpr int kPieceK = kDim / kPieces, kPieceV = kDimV / kPieces;
  static constexpr int kWarpPieceV = kWarpDimV / kPieces;
  static constexpr int kBytes = kElementBytes<kDtype>;
  static_assert(kDimV <= kDim, "O is stored through the shared memory of Q");
  static_assert(kBlockM % (kThreads / 8) == 0 || kThreads / 8 > kBlockM);

  static_assert(kPieces == 1 || kPieceK == kPieceV, "pieces of K and V use the same memory");

  using QTile = SharedTile<kDtype, kDim>;
  using OTile = SharedTile<kDtype, kDimV>;
  using KTile = SharedTile<kDtype, kPieceK>;
  using VTile = SharedTile<kDtype, kPieceV>;
  using Scores = float[kMmaM][kBlockN / 8][4];
  using Output = float[kMmaM][kWarpDimV / 8][4];

  struct SharedStorage {
    alignas(128) uint8_t q[kBlockM * kDim * kBytes];
    alignas(128) uint8_t k[kBlockN * kPieceK * kBytes];
    alignas(128) uint8_t v[kBlockN * kPieceV * kBytes];
  };
  static_assert(sizeof(SharedStorage) <= 99 * 1024, "the limit of a CTA on sm_86 and sm_89");
};

template <KernelConfig C>
struct SharedTiles {
  typename Traits<C>::QTile q;
  typename Traits<C>::KTile k;
  typename Traits<C>::VTile v;

  TEA_DEVICE explicit SharedTiles(typename Traits<C>::SharedStorage& s)
      : q{shared_address(s.q)}, k{shared_address(s.k)}, v{shared_address(s.v)} {}
};

}  // namespace tea::portable
