// Words over PTX for plain runs of bytes that the copy engine moves between global and shared
// memory: loads complete on a barrier, stores in groups. From sm_90 on.
#pragma once
#include "gpu/ptx.cuh"

namespace tea {

// Addresses and sizes are multiples of 16 bytes.
struct alignas(8) RunBarrier {
  uint64_t state;

  // By one thread, before the others come to a barrier of the block.
  TEA_DEVICE void start() {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\n" ::"r"(shared_address(this)) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
  }
  // The phase ends when so many bytes have come.
  TEA_DEVICE void expect(uint32_t bytes) {
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(shared_address(this)),
        "r"(bytes)
        : "memory");
  }
  TEA_DEVICE void load(void* to, const void* from, uint32_t bytes) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
        "[%3];\n" ::"r"(shared_address(to)),
        "l"(from), "r"(bytes), "r"(shared_address(this))
        : "memory");
  }
  // For the end of the phase of this parity; the first is 0.
  TEA_DEVICE void wait(uint32_t parity) {
    uint32_t done = 0;
    while (!done)
      asm volatile(
          "{\n .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
          " selp.u32 %0, 1, 0, p;\n}\n"
          : "=r"(done)
          : "r"(shared_address(this)), "r"(parity)
          : "memory");
  }
};

TEA_DEVICE void store_run(void* to, const void* from, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n" ::"l"(to),
               "r"(shared_address(from)), "r"(bytes)
               : "memory");
}
TEA_DEVICE void commit_runs() { asm volatile("cp.async.bulk.commit_group;\n" ::: "memory"); }
// At most kPending groups still read shared memory.
template <int kPending>
TEA_DEVICE void wait_runs_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;\n" ::"n"(kPending) : "memory");
}
// Ordinary writes to shared memory become visible to the copy engine.
TEA_DEVICE void fence_runs() { asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory"); }

}  // namespace tea
