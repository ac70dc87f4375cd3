// Barriers of a cluster, and the ring of stages that a producer and its consumers share. The words
// of one block are in gpu/bulk.cuh.
#pragma once
#include "hopper/device/ptx.cuh"

namespace tea::hopper {

// Arrives at the same barrier in another block of the cluster.
TEA_DEVICE void arrive_remote(Barrier& b, uint32_t rank) {
  perturb();
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];\n" ::"r"(
                   cluster_address(shared_address(&b), rank))
               : "memory");
}

// Where a role stands in a ring of stages, and the parity of its pass.
template <int kStages>
struct Position {
  int stage = 0;
  uint32_t parity = 0;
  TEA_DEVICE void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// Barriers of a ring: full when the data is there, empty when every consumer has let go.
template <int kStages>
struct Ring {
  Barrier full[kStages], empty[kStages];

  // By one thread, then publish_barriers() and a block or cluster barrier.
  TEA_DEVICE void start(uint32_t producers, uint32_t consumers) {
    for (int i = 0; i < kStages; ++i) {
      init(full[i], producers);
      init(empty[i], consumers);
    }
  }
  // The producer's first pass finds every stage empty: it waits for the phase before.
  TEA_DEVICE void wait_empty(Position<kStages> at) { wait(empty[at.stage], at.parity ^ 1); }
  TEA_DEVICE void wait_full(Position<kStages> at) { wait(full[at.stage], at.parity); }
  TEA_DEVICE void fill(Position<kStages> at, uint32_t transaction_bytes) {
    arrive_expecting(full[at.stage], transaction_bytes);
  }
  TEA_DEVICE void release(Position<kStages> at) { arrive(empty[at.stage]); }
};

}  // namespace tea::hopper
