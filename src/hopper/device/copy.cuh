// cp.async with a cache policy. Copies of boxes of a tensor map are in tma.cuh.
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

}  // namespace tea::hopper
