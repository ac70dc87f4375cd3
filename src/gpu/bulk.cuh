// PTX wrappers for sm_90 and later: mbarriers, bulk copies of contiguous bytes between global and
// shared memory, and the fence of the async proxy.
#pragma once
#include "gpu/ptx.cuh"

namespace tea {

// In a test build (TEA_PERTURB), sleeps up to a microsecond at random. Called wherever another warp
// may overtake this one, so that a missing wait shows as a wrong result.
TEA_DEVICE void perturb() {
#if TEA_PERTURB
  uint32_t now;
  asm volatile("mov.u32 %0, %%clock;\n" : "=r"(now));
  const uint32_t random = (now ^ threadIdx.x / 32 * 0x9E3779B9u ^ blockIdx.x << 20) * 0x85EBCA6Bu;
  if (random >> 30 == 0) asm volatile("nanosleep.u32 %0;\n" ::"r"(random >> 20 & 1023));
#endif
}

// An mbarrier. A wait names the parity of the phase that must have completed. A new barrier is in
// phase 0, and the phase before it counts as complete.
struct alignas(8) Barrier {
  uint64_t state;
};

TEA_DEVICE void init(Barrier& b, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(shared_address(&b)), "r"(arrivals)
               : "memory");
}
// Required after init() and before another CTA or TMA uses the barriers.
TEA_DEVICE void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
}
TEA_DEVICE void arrive(Barrier& b) {
  perturb();
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(shared_address(&b)) : "memory");
}
// Arrives, and keeps the phase open until this many bytes have been copied.
TEA_DEVICE void arrive_and_expect_tx(Barrier& b, uint32_t transaction_bytes) {
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
// As try_wait(), which may suspend the thread for a while, but returns at once.
TEA_DEVICE bool test_wait(Barrier& b, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n .reg .pred p;\n mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
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

// Makes ordinary writes to shared memory visible to TMA and wgmma.
TEA_DEVICE void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
}

// Addresses and sizes are multiples of 16 bytes.
TEA_DEVICE void bulk_load(void* to, const void* from, uint32_t size, Barrier& b) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];\n" ::"r"(shared_address(to)),
      "l"(from), "r"(size), "r"(shared_address(&b))
      : "memory");
}
TEA_DEVICE void bulk_store(void* to, const void* from, uint32_t size) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n" ::"l"(to),
               "r"(shared_address(from)), "r"(size)
               : "memory");
}
TEA_DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;\n" ::: "memory"); }
// Waits until at most kPending bulk groups still read shared memory.
template <int kPending>
TEA_DEVICE void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;\n" ::"n"(kPending) : "memory");
}

}  // namespace tea
