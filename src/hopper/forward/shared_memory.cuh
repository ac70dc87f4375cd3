// The shapes of a kernel and its shared memory.
//
// Q, K, V and O are stored in slabs one swizzle wide. O has memory of its own where there is room:
// the memory of Q is free for the next tile as soon as the last scores have been computed, before O
// is.
#pragma once
#include "hopper/device/pipeline.cuh"
#include "hopper/device/work_queue.cuh"
#include "hopper/forward/params.cuh"
#include "hopper/forward/score_mod.cuh"

namespace tea::hopper {

// Whether the store warp stores O. The consumers store O in fp32, for which there is no room.
template <KernelConfig C>
TEA_HOST_DEVICE bool stores_by_tma(const AttentionArguments& a) {
  return C.tile.tma_store && a.o.dtype != TEA_FP32;
}

template <KernelConfig C>
struct Traits {
  static constexpr int kDim = C.tile.dim, kDimV = C.tile.dim_v;
  static constexpr int kConsumers = C.tile.consumer_warpgroups;
  static constexpr int kBlockM = C.tile.block_m(), kBlockN = C.tile.block_n;
  static constexpr int kThreads = 128 + 128 * kConsumers;
  static constexpr int kQStages = C.tile.q_stages, kKvStages = C.tile.kv_stages;
  static constexpr Swizzle kSwizzle = kDim % 64 == 0 ? Swizzle::k128 : Swizzle::k64;
  static constexpr int kSlabBytes = width(kSwizzle), kSlabDim = kSlabBytes / 2;
  static_assert(kDim % kSlabDim == 0 && kDimV % kSlabDim == 0 && kDimV <= kDim);
  // A tile of more key blocks than this has its successor's number fetched when K of so many blocks
  // has not been loaded: late enough for SMs to finish together, and early enough for the successor
  // to be found and described by the time that its first load may begin.
  static constexpr int kFetchLead = 4;

  struct SharedStorage {
    alignas(1024) uint8_t q[kQStages][kConsumers][64 * kDim * 2];
    alignas(1024) uint8_t k[kKvStages][kBlockN * kDim * 2];
    alignas(1024) uint8_t v[kKvStages][kBlockN * kDimV * 2];
    alignas(1024) uint8_t bias[C.bias() ? kConsumers : 0][BiasTile::bytes(kBlockN)];
    alignas(1024) uint8_t o[C.tile.tma_store ? kConsumers : 0][64 * kDimV * 2];
    Pipeline<kQStages> pipeline_q[kConsumers];
    Pipeline<kKvStages> pipeline_k, pipeline_v;
    Pipeline<1> pipeline_bias[C.bias() ? kConsumers : 0];
    Pipeline<1> pipeline_o[C.tile.tma_store ? kConsumers : 0];
    WorkQueue<WorkTile> work;
    Barrier nearly_loaded;      // see kFetchLead
    WorkTile next;              // the scheduler warp's: the descriptor to be published next,
    SequenceBounds window[32];  // and the bounds of the sequences that it searches
    uint32_t never_written;     // see wait_after()
  };
  static_assert(sizeof(SharedStorage) <= 227 * 1024, "the shared memory of a CTA on sm_90");

  // Slabs that hold any of the first `dim` elements of a row.
  static TEA_DEVICE int num_slabs(int dim) { return (dim + kSlabDim - 1) / kSlabDim; }

  // The batch coordinate of a tensor map.
  static TEA_DEVICE int batch_of(const SequenceLayout& layout, const WorkTile& w) {
    return layout.form == TEA_RAGGED ? 0 : w.batch;
  }

  // Called by one thread. The arrival counts: the load warp's one thread fills a stage of Q, K and
  // V, one thread of each consumer warp releases it; one thread of each warp of a consumer fills O,
  // the store warp's one thread releases it; every consumer thread, the load warp's and the store
  // warp's one thread release a work descriptor.
  static TEA_DEVICE void init_pipelines(SharedStorage& s) {
    for (auto& pipeline : s.pipeline_q) pipeline.init(1, 4);
    s.pipeline_k.init(1, 4 * kConsumers);
    s.pipeline_v.init(1, 4 * kConsumers);
    for (auto& pipeline : s.pipeline_bias) pipeline.init(1, 4);
    for (auto& pipeline : s.pipeline_o) pipeline.init(4, 1);
    s.work.pipeline.init(1, 128 * kConsumers + (C.tile.tma_store ? 2 : 1) + (C.paged() ? 1 : 0));
    tea::init(s.nearly_loaded, 1);
    fence_barrier_init();
  }
};

}  // namespace tea::hopper
