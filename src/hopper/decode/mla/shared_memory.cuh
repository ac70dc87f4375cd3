// The shapes of the MLA kernel and its shared memory.
#pragma once
#include "hopper/decode/mla/config.h"
#include "hopper/decode/scheduler.cuh"
#include "hopper/device/accumulator.cuh"
#include "hopper/device/copy.cuh"
#include "hopper/device/pipeline.cuh"

namespace tea::hopper::decode::mla {

inline constexpr int kBlockN = kBlockShape.keys;
inline constexpr int kConsumers = 2;  // warpgroups
inline constexpr int kConsumerThreads = 128 * kConsumers, kProducerThreads = 128;
inline constexpr int kThreads = kConsumerThreads + kProducerThreads;
// Of a consumer's and of the producer's threads; a launch has 168 for each.
inline constexpr int kConsumerRegisters = 224, kProducerRegisters = 56;
inline constexpr int kColumns = kDimV / kConsumers;  // of O and V, of each consumer

// Named barriers; 0 is __syncthreads().
enum NamedBarrier {
  kConsumerBarrier = 1,
  kProbabilitiesBarrier,
  kWarpgroupBarrier = 4,
  kProducerBarrier = 6
};
static_assert(kWarpgroupBarrier == kProbabilitiesBarrier + 2);
static_assert(kProducerBarrier == kWarpgroupBarrier + kConsumers);

// Slabs of 64 columns with TMA's swizzle.
inline constexpr Swizzle kSwizzle = Swizzle::k128;
inline constexpr int kSlabColumns = width(kSwizzle) / 2, kSlabs = kDim / kSlabColumns;
inline constexpr int kSlabBytes = 64 * width(kSwizzle);
static_assert(kBlockM == 64 && kBlockN == 64 && kColumns % kSlabColumns == 0);

// The parts of a block of K or V: the columns of each consumer's O, and those that only K has. Each
// slab is released and arrives on its own, so that products begin with the first.
inline constexpr int kParts = kConsumers + 1, kRest = kConsumers;
inline constexpr int kPartSlabs = kColumns / kSlabColumns;
TEA_HOST_DEVICE constexpr int part_of(int slab) { return slab / kPartSlabs; }
static_assert(part_of(kSlabs - 1) == kRest);

// The maximum and the sum of a row's unnormalised probabilities.
struct RowState {
  float max, sum;
};
struct LaunchParams : KernelParams {
  TensorMap k, v;
  FastDivisor row_tiles;
  int box_rows_log2;
  bool gathers;  // rows by cp.async instead of boxes by TMA
  bool shares_kv;
  int ctas;
  DividedTile* divided_tiles;  // null if no tile is divided

  TEA_DEVICE int head_kv(const WorkItem& item) const { return item.tile / row_tiles; }
  TEA_DEVICE int first_row(const WorkItem& item) const { return item.tile % row_tiles * kBlockM; }
  TEA_DEVICE float* slot(int cta, bool ends_tile) const {
    return slots + (2 * int64_t{cta} + ends_tile) * kSlotFloats;
  }
};
// kSharedKvBoxes: a kernel only for K that is loaded in boxes and has V as a part of it. Its code
// is shorter, because it need not test these conditions.
template <bool kSharedKvBoxes>
TEA_DEVICE bool gathers(const LaunchParams& p) {
  return !kSharedKvBoxes && p.gathers;
}
template <bool kSharedKvBoxes>
TEA_DEVICE bool shares_kv(const LaunchParams& p) {
  return kSharedKvBoxes || p.shares_kv;
}
TEA_DEVICE RowState* slot_rows(float* slot) {
  return reinterpret_cast<RowState*>(slot + kBlockM * kDimV);
}

struct alignas(1024) SharedStorage {  // where the pattern of the swizzle repeats
  uint8_t kv[2][kSlabs][kSlabBytes];  // two blocks of keys
  uint8_t q[kSlabs][kSlabBytes];
  uint8_t p[kSlabBytes];  // unnormalised probabilities of a block
  Barrier full[2][kSlabs], empty[2][kSlabs];
  // Of the last block whose probabilities are in `p`: each row's maximum, and by what its sums so
  // far are multiplied.
  float row_max[kBlockM], rescale[kBlockM];
  float sums[kConsumers][kBlockM];
  WorkCursor<kBlockShape> work, load_work;  // at the items that are computed and loaded
  SearchStorage search;
};
static_assert(sizeof(SharedStorage) <= 227 * 1024, "the shared memory of a CTA on sm_90");

// Blocks of keys are numbered from 0 in the order in which a CTA computes them. Block n is in
// buffer n % 2, and consumer n % 2 computes its scores.
//
// Where V is not a part of K, it is loaded over the columns of K when the scores have been
// computed: a buffer's part is then filled twice for each block, except for kRest.
struct Fill {
  int buffer;
  uint32_t parity;  // of the phase of the part's barriers

  TEA_DEVICE Fill(bool shares_kv, int number, int part, bool is_v) : buffer(number % 2) {
    const int blocks_before = number / 2;
    parity = static_cast<uint32_t>(shares_kv || part == kRest ? blocks_before : is_v) & 1;
  }
};

}  // namespace tea::hopper::decode::mla
