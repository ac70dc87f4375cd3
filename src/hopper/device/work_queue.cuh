// A queue in shared memory through which one warp publishes work descriptors to the other warps of
// the CTA, one descriptor ahead of the one in use.
#pragma once
#include "hopper/device/pipeline.cuh"

namespace tea::hopper {

// Reader threads release a slot through `pipeline` when they no longer need its descriptor.
template <class Descriptor>
struct WorkQueue {
  Pipeline<2> pipeline;
  Descriptor slot[2];

  // Waits until every reader has released the slot, and returns it for writing.
  TEA_DEVICE Descriptor& acquire(PipelineState<2> state) {
    pipeline.producer_acquire(state);
    return slot[state.stage];
  }
  // Arriving has release semantics, which makes the writes to the slot visible to the readers.
  TEA_DEVICE void publish(PipelineState<2>& state) {
    arrive(pipeline.full[state.stage]);
    state.advance();
  }
  TEA_DEVICE const Descriptor& read(PipelineState<2> state) {
    pipeline.consumer_wait(state);
    return slot[state.stage];
  }
};

}  // namespace tea::hopper
