// mbarrier, and the ring of stages that a producer and its consumers share. A wait names the parity
// of the phase it waits for: a fresh barrier is in phase 0, and the phase before it counts as done.
#pragma once
#include "hopper/device/ptx.cuh"

namespace tea::hopper {

struct alignas(8) Barrier {
  uint64_t state;
};

TEA_DEVICE void init(Barrier& b, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(shared_address(&b)), "r"(arrivals)
               : "memory");
}
// After init, before another block or the copy engine uses the barriers.
TEA_DEVICE void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
}
TEA_DEVICE void arrive(Barrier& b) {
  perturb();
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(shared_address(&b)) : "memory");
}
// Arrives at the same barrier in another block of the cluster.
TEA_DEVICE void arrive_remote(Barrier& b, uint32_t rank) {
  perturb();
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];\n" ::"r"(
                   cluster_address(shared_address(&b), rank))
               : "memory");
}
// The same of one who only read, and whose reads are over: what it wrote before is not ordered.
TEA_DEVICE void arrive_remote_reader(Barrier& b, uint32_t rank) {
  perturb();
  asm volatile("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];\n" ::"r"(
                   cluster_address(shared_address(&b), rank))
               : "memory");
}
// Arrives, and holds the phase open until the copy engine has brought this many bytes.
TEA_DEVICE void arrive_expecting(Barrier& b, uint32_t transaction_bytes) {
  perturb();
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(shared_address(&b)),
               "r"(transaction_bytes)
               : "memory");
}
TEA_DEVICE bool try_wait(Barrier& b, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      " selp.u32 %0, 1, 0, p;\n}\n"
      : "=r"(done)
      : "r"(shared_address(&b)), "r"(parity)
      : "memory");
  return done != 0;
}
TEA_DEVICE void wait(Barrier& b, uint32_t parity) {
  perturb();
  while (!try_wait(b, parity)) {
  }
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
