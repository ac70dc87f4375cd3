// cp.async with a cache policy, and its arrival at a barrier. Copies of boxes of a tensor map are
// in tma.cuh.
#pragma once
#include "gpu/async_copy.cuh"
#include "hopper/device/tma.cuh"

namespace tea::hopper {

// cp_async_16() with a cache policy.
TEA_DEVICE void cp_async_16(uint32_t to, const void* from, bool valid, CachePolicy cache) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;\n" ::"r"(to),
               "l"(from), "r"(valid ? 16 : 0), "l"(cache)
               : "memory");
}

// Reads the line of a word, so that it is in L1 later.
TEA_DEVICE void prefetch_l1(const int32_t* from) {
  asm volatile("prefetch.global.L1 [%0];\n" ::"l"(from));
}

// Arrives at the barrier when the copies that the thread has started so far are complete.
TEA_DEVICE void cp_async_arrive(Barrier& b) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];\n" ::"r"(shared_address(&b))
               : "memory");
}

// The parts of arrive_and_expect_tx(), for a thread that arrives for several.
TEA_DEVICE void expect_tx(Barrier& b, uint32_t transaction_bytes) {
  asm volatile(
      "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;\n" ::"r"(shared_address(&b)),
      "r"(transaction_bytes)
      : "memory");
}
TEA_DEVICE void arrive(Barrier& b, uint32_t count) {
  perturb();
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;\n" ::"r"(shared_address(&b)),
               "r"(count)
               : "memory");
}

}  // namespace tea::hopper
