// PTX wrappers for sm_80 and later: cp.async, copies from global to shared memory by single
// threads.
#pragma once
#include "gpu/ptx.cuh"

namespace tea {

// Copies 16 bytes to shared memory asynchronously; unless valid, 16 zeros, and `from` is not read.
TEA_DEVICE void cp_async_16(uint32_t to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(to), "l"(from),
               "r"(valid ? 16 : 0)
               : "memory");
}
// The same with 4 bytes.
TEA_DEVICE void cp_async_4(uint32_t to, const void* from, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;\n" ::"r"(to), "l"(from),
               "r"(valid ? 4 : 0)
               : "memory");
}
TEA_DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
// Waits until at most kGroups of the thread's latest groups of copies are incomplete.
template <int kGroups>
TEA_DEVICE void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kGroups) : "memory");
}

}  // namespace tea
