// The shapes of the main backward kernel and its shared memory.
#pragma once
#include "portable/backward/config.h"
#include "portable/device/mma.cuh"

namespace tea::portable {

// How the warps divide a matrix of kRows x kColumns: kWarpsM of them along its rows.
template <int kRows, int kColumns, int kWarpsM, int kWarps>
struct WarpGrid {
  static constexpr int kWarpRows = kRows / kWarpsM, kWarpColumns = kColumns / (kWarps / kWarpsM);
  static_assert(kWarpRows % 16 == 0 && kWarpColumns % 16 == 0 && kWarps % kWarpsM == 0);
  static constexpr int kMmaM = kWarpRows / 16, kMmaN = kWarpColumns / 8;
  using Accumulator = float[kMmaM][kMmaN][4];

  static TEA_DEVICE int row(int warp) { return warp % kWarpsM * kWarpRows; }
  static TEA_DEVICE int column(int warp) { return warp / kWarpsM * kWarpColumns; }
};

template <BackwardConfig C>
struct BackwardTraits {
  static constexpr int kDtype = C.dtype, kDim = C.tile.dim;
  static constexpr int kBlockM = C.tile.block_m, kBlockN = C.tile.block_n;
  static constexpr int kThreads = 32 * C.tile.warps, kStages = C.tile.stages;
  static constexpr bool kGeneral = C.tile.general;

  using Operand = SharedTile<kDtype, kDim>;          // Q, K, V and dO
  using ScoreOperand = SharedTile<kDtype, kBlockN>;  // P and dS
  using ScoreGrid = WarpGrid<kBlockM, kBlockN, C.tile.warps_m_scores, C.tile.warps>;
  using DkvGrid = WarpGrid<kBlockN, kDim, C.tile.warps_m_dkv, C.tile.warps>;
  using DqGrid = WarpGrid<kBlockM, kDim, C.tile.warps_m_dq, C.tile.warps>;

  struct SharedStorage {
    alignas(128) uint8_t k[kBlockN * kDim * 2];
    alignas(128) uint8_t v[kBlockN * kDim * 2];
    alignas(128) uint8_t q[kStages][kBlockM * kDim * 2];
    alignas(128) uint8_t dout[kStages][kBlockM * kDim * 2];
    alignas(128) uint8_t p[kBlockM * kBlockN * 2];
    alignas(128) uint8_t ds[kBlockM * kBlockN * 2];
    float lse2[kStages][kBlockM], delta[kStages][kBlockM];
  };
  static_assert(sizeof(SharedStorage) == C.tile.shared_bytes());
  static_assert(sizeof(SharedStorage) <= 227 * 1024, "the limit of a CTA on sm_90");
};

}  // namespace tea::portable
