// The shapes of a decoding kernel and its shared memory.
//
// The eight rows that ldmatrix reads at once are in different banks: K and V are stored in slabs of
// 64 columns (FP8: 64 or 128) with TMA's swizzle, rows of Q are padded by 16 bytes.
#pragma once
#include "hopper/decode/scheduler.cuh"
#include "hopper/device/copy.cuh"
#include "hopper/device/swizzle.cuh"

namespace tea::hopper::decode {

template <KernelConfig C>
struct Traits {
  static constexpr int kDim = C.tile.dim, kDimV = C.tile.dim_v;
  static constexpr int kMmaM = C.tile.mma_m, kBlockM = C.tile.block_m();
  static constexpr int kTeamWarps = C.tile.team_warps, kTeams = C.tile.teams;
  static constexpr int kThreads = C.tile.computing_threads(), kAllThreads = C.tile.threads();
  static constexpr bool kHasProducers = C.tile.has_producers, kIsPlain = C.is_plain;
  static_assert(!kIsPlain || kHasProducers);
  static constexpr int kStages = C.tile.stages;
  static constexpr int kKvBytes = C.has_fp8_kv ? 1 : 2;  // of an element of K and V
  // A slab is as wide as the swizzle, and slabs divide the rows of K and V.
  static constexpr Swizzle kSwizzle =
      kDim * kKvBytes % 128 == 0 && kDimV * kKvBytes % 128 == 0 ? Swizzle::k128 : Swizzle::k64;
  static constexpr int kSlabColumns = width(kSwizzle) / kKvBytes,
                       kSlabBytes = kBlockN * width(kSwizzle);
  static constexpr int kPitchQ = 2 * kDim + 16;  // bytes
  static constexpr int kPassColumns = kDimV / C.tile.passes;
  static constexpr int kPassPitch = kPassColumns + 8;  // floats, for the same reason
  static_assert(!kHasProducers || kTeamWarps == 1);
  static_assert(kPassColumns % 16 == 0 && kDim % kSlabColumns == 0 && kDimV % kSlabColumns == 0);

  using Cursor = WorkCursor<kBlockShape, kIsPlain>;
  struct alignas(1024) Stage {  // where the pattern of the swizzle repeats
    uint8_t k[kDim / kSlabColumns * kSlabBytes];
    uint8_t v[kDimV / kSlabColumns * kSlabBytes];
  };
  // The maximum and the sum of a row's unnormalised probabilities.
  struct RowState {
    float max, sum;
  };
  struct SharedStorage {
    Stage stages[kTeams][kStages];
    Barrier full[kTeams][kStages];   // the block of a stage has arrived
    Barrier empty[kTeams][kStages];  // and has been computed, where there are producers
    alignas(16) uint8_t q[kBlockM * kPitchQ];
    float q_scale[C.scales_q() ? kBlockM : 1];          // of the rows of Q in fp16
    alignas(16) float o[kTeams][kBlockM * kPassPitch];  // of one pass
    RowState rows[kTeams][kBlockM];
    float slopes[kBlockM];  // of ALiBi
    Cursor work;            // at the item that is computed
    OtherParts others;      // of that item
    SearchStorage search;
    uint32_t read_parameters[kAllThreads / 32];
  };
  static_assert(sizeof(SharedStorage) <= 227 * 1024, "the shared memory of a CTA on sm_90");

  // Slabs that hold any of the first `dim` columns.
  static TEA_DEVICE int num_slabs(int dim) { return (dim + kSlabColumns - 1) / kSlabColumns; }

  // A barrier of the warps that compute.
  static TEA_DEVICE void sync() {
    if constexpr (kHasProducers)
      named_barrier_sync(1, kThreads);
    else
      __syncthreads();
  }
};

}  // namespace tea::hopper::decode
