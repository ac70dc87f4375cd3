// The shapes of a decoding kernel and its shared memory.
//
// Rows of Q, K and V are padded by 16 bytes, so that the eight rows that ldmatrix reads at once are
// in different banks. In contrast to a swizzle this needs no particular width of a row.
#pragma once
#include "hopper/decode/scheduler.cuh"
#include "hopper/device/copy.cuh"

namespace tea::hopper::decode {

template <KernelConfig C>
struct Traits {
  static constexpr int kDim = C.tile.dim, kDimV = C.tile.dim_v;
  static constexpr int kMmaM = C.tile.mma_m, kBlockM = C.tile.block_m();
  static constexpr int kTeamWarps = C.tile.team_warps, kTeams = C.tile.teams;
  static constexpr int kThreads = C.tile.threads(), kStages = C.tile.stages;
  static constexpr int kPitchK = 2 * kDim + 16, kPitchV = 2 * kDimV + 16;  // bytes
  static constexpr int kPassColumns = kDimV / C.tile.passes;
  static constexpr int kPassPitch = kPassColumns + 8;  // floats, for the same reason
  static_assert(kPassColumns % 16 == 0);

  struct Stage {
    alignas(16) uint8_t k[kBlockN * kPitchK];
    alignas(16) uint8_t v[kBlockN * kPitchV];
  };
  // The maximum and the sum of a row's unnormalised probabilities.
  struct RowState {
    float max, sum;
  };
  struct SharedStorage {
    alignas(128) Stage stages[kTeams][kStages];
    alignas(16) uint8_t q[kBlockM * kPitchK];
    alignas(16) float o[kTeams][kBlockM * kPassPitch];  // of one pass
    RowState rows[kTeams][kBlockM];
    float slopes[kBlockM];  // of ALiBi
    WorkCursor work;        // at the item that is computed
    SearchStorage search;
  };
  static_assert(sizeof(SharedStorage) <= 227 * 1024, "the shared memory of a CTA on sm_90");
};

}  // namespace tea::hopper::decode
