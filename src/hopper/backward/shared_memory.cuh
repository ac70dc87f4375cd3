// The shapes of a kernel and its shared memory.
//
// Operands are stored in slabs one swizzle wide. dS has the rows of the query block and one slab of
// 128 bytes for each consumer's keys; there are two, so that one barrier in a step is enough:
// a consumer writes dS of step i + 2 only after the barrier of step i + 1, before which all
// products of step i have completed. With ping-pong, a consumer writes dS of step i + 2 after it
// has waited for the other one's dS of step i + 1 (consumer 1: of step i + 2), before which the
// other one has finished with dS of step i.
//
// At the end of a tile, dV and dK are staged for TMA in both stages of dS, and in the stage of Q
// and dO of the last step. That stage is released in the first step of the next tile, which has the
// other one, or with ping-pong before that step.
#pragma once
#include "hopper/backward/params.cuh"
#include "hopper/device/pipeline.cuh"
#include "hopper/device/work_queue.cuh"

namespace tea::hopper::backward {

template <KernelConfig C>
struct Traits {
  static constexpr int kDim = C.tile.dim, kBlockM = C.tile.block_m;
  static constexpr int kConsumers = 2, kStoreWarps = 2;
  // The consumer whose unit of a pair is staged first.
  static constexpr int kFirstStaging = C.tile.ping_pong ? 1 : 0;
  // Four do not fit into the shared memory where a step has 128 rows.
  static constexpr int kPostprocessWarps = kBlockM == 128 ? 3 : 4;
  static constexpr int kServiceThreads = 256, kThreads = kServiceThreads + 128 * kConsumers;
  static constexpr int kQStages = C.tile.q_stages, kDoutStages = C.tile.dout_stages;
  static constexpr int kStagingStages = C.tile.dq_stages;
  static constexpr Swizzle kSwizzle = kDim % 64 == 0 ? Swizzle::k128 : Swizzle::k64;
  static constexpr int kSlabBytes = width(kSwizzle), kSlabDim = kSlabBytes / 2;
  static constexpr int kSlabs = kDim / kSlabDim;
  static_assert(kDim % kSlabDim == 0 && (kBlockM == 64 || kBlockM == 128));
  // Units of dV and dK that a consumer accumulates in memory if several tiles share a key block.
  static constexpr int kUnitsPerTensor = units_per_row(kDim);
  static_assert(kBlockM * kUnitsPerTensor == 128, "dQ of a step is one unit for each consumer");
  static constexpr Swizzle kDsSwizzle = Swizzle::k128;
  static constexpr int kDsSlabBytes = kBlockM * width(kDsSwizzle);
  // dV and dK of a consumer are staged in slabs of 64 keys: one where its columns of dS were, the
  // other one in a stage of Q or dO.
  static constexpr int kOutputSlabBytes = 64 * kSlabBytes;
  static constexpr int kOutputSlabsPerStage = kDsSlabBytes / kOutputSlabBytes;
  static_assert(kSlabs <= 2 * kOutputSlabsPerStage);
  static_assert(kOutputSlabBytes <= kBlockM * kSlabBytes,
                "a slab of Q or dO holds one of dK or dV");
  // dQ's product reads columns of K up to the end of a unit: zeros beyond kDim.
  static constexpr int kColumnsOfK = 64 * kUnitsPerTensor;

  struct SharedStorage {
    alignas(1024) uint8_t k[kBlockN * kColumnsOfK * 2];
    alignas(1024) uint8_t v[kBlockN * kDim * 2];
    alignas(1024) uint8_t q[kQStages][kBlockM * kDim * 2];
    alignas(1024) uint8_t dout[kDoutStages][kBlockM * kDim * 2];
    alignas(1024) uint8_t ds[2][kBlockM * kBlockN * 2];
    // From the consumers to the store warps: units of dQ, and of dV and dK if groups have parts.
    alignas(1024) uint8_t staging[kStagingStages][kUnitBytes];
    alignas(16) RowTerms terms[kQStages][kBlockM];
    alignas(16) RowTerms selectors[2][8];  // of `score` and of `gradient` (init_selectors)
    // Of each postprocess warp: two pieces of a unit, and the description of the unit.
    alignas(16) float pieces[kPostprocessWarps][2][16 * 32];
    CompletedPair units[kPostprocessWarps];
    Pipeline<1> pipeline_k, pipeline_v;
    Pipeline<kQStages> pipeline_q;
    Pipeline<kDoutStages> pipeline_dout;
    Pipeline<kStagingStages> pipeline_staging;
    Barrier all_loads_issued;  // of a tile: its last step is about to begin
    Barrier no_more_tiles;     // the scheduler warp has found none
    WorkQueue<WorkTile> work;
    int window[32];  // the scheduler warp's: keys of the sequences that it searches
  };
  static_assert(sizeof(SharedStorage) <= 227 * 1024, "the shared memory of a CTA on sm_90");
  // compute-sanitizer expects 16 columns of two bytes for each row of an operand, also where fewer
  // repeat: 64 rows of selectors, kBlockM rows of terms. Without `pieces` behind them it would
  // report reads beyond the shared memory, which do not happen.
  static_assert(sizeof(SharedStorage::pieces) >= kBlockM * 16 * 2);

  // Slabs that hold any of the first `dim` elements of a row.
  static TEA_DEVICE int num_slabs(int dim) { return (dim + kSlabDim - 1) / kSlabDim; }

  // The batch coordinate of a tensor map.
  static TEA_DEVICE int batch_of(const SequenceLayout& layout, const WorkTile& w) {
    return layout.form == TEA_RAGGED ? 0 : w.batch;
  }

  // Eight rows of the A operands that add the terms of a row: bf16 ones where RowTerms has parts of
  // `score`, or of `gradient`. Called by eight threads.
  static TEA_DEVICE void init_selectors(SharedStorage& s, int row) {
    s.selectors[0][row] = s.selectors[1][row] = {};
    s.selectors[0][row].score = s.selectors[1][row].gradient = {0x3F803F80, 0x3F80};
    fence_proxy_async();
  }

  // Called by one thread. One thread fills stages of Q, K, V and dO, one thread of each consumer
  // warp releases them; one thread of each warp of a consumer fills a staging buffer, a store
  // warp's one thread releases it; consumers, the load warp's and the store warps' one thread
  // release a work descriptor.
  static TEA_DEVICE void init_pipelines(SharedStorage& s) {
    s.pipeline_k.init(1, 4 * kConsumers);
    s.pipeline_v.init(1, 4 * kConsumers);
    s.pipeline_q.init(1, 4 * kConsumers);
    s.pipeline_dout.init(1, 4 * kConsumers);
    s.pipeline_staging.init(4, 1);
    init(s.all_loads_issued, 1);
    init(s.no_more_tiles, 1);
    s.work.pipeline.init(1, 128 * kConsumers + 1 + kStoreWarps);
    fence_barrier_init();
  }
};

}  // namespace tea::hopper::backward
