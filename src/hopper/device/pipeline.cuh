// mbarrier pipelines between a producer and its consumers (CUTLASS: PipelineTmaAsync), and the
// arrival at a barrier of another CTA of the cluster. Barriers within a CTA are in gpu/bulk.cuh.
#pragma once
#include "hopper/device/ptx.cuh"

namespace tea::hopper {

// Arrives at the same barrier in another CTA of the cluster.
TEA_DEVICE void arrive_remote(Barrier& b, uint32_t rank) {
  perturb();
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];\n" ::"r"(
                   map_shared_address(shared_address(&b), rank))
               : "memory");
}

// The stage that a role uses next, and the phase parity of its current pass over the stages.
template <int kStages>
struct PipelineState {
  int stage = 0;
  uint32_t parity = 0;
  TEA_DEVICE void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// `full` completes when the data of a stage has arrived, `empty` when every consumer has released
// the stage.
template <int kStages>
struct Pipeline {
  Barrier full[kStages], empty[kStages];

  // Called by one thread, followed by fence_barrier_init() and a barrier of the CTA or cluster.
  TEA_DEVICE void init(uint32_t producer_arrivals, uint32_t consumer_arrivals) {
    for (int i = 0; i < kStages; ++i) {
      tea::init(full[i], producer_arrivals);
      tea::init(empty[i], consumer_arrivals);
    }
  }
  // In the producer's first pass every stage is empty: waiting for the opposite parity returns at
  // once, because the phase before the first one counts as complete.
  TEA_DEVICE void producer_acquire(PipelineState<kStages> state) {
    wait(empty[state.stage], state.parity ^ 1);
  }
  TEA_DEVICE void producer_expect_tx(PipelineState<kStages> state, uint32_t transaction_bytes) {
    arrive_and_expect_tx(full[state.stage], transaction_bytes);
  }
  TEA_DEVICE void consumer_wait(PipelineState<kStages> state) {
    wait(full[state.stage], state.parity);
  }
  TEA_DEVICE void consumer_release(PipelineState<kStages> state) { arrive(empty[state.stage]); }
};

}  // namespace tea::hopper
