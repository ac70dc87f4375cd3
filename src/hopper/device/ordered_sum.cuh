// Ordered accumulation in global memory: the CTAs that add to the same memory do so in an order
// that a counter of the contributions received enforces, so that the bits of the sum do not depend
// on timing. The contributions are bulk copies and reductions (device/tma.cuh), which the async
// proxy performs.
#pragma once
#include "hopper/device/ptx.cuh"

namespace tea::hopper {

TEA_DEVICE uint32_t load_acquire(const uint32_t& from) {
  uint32_t x;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];\n" : "=r"(x) : "l"(&from) : "memory");
  return x;
}
// Four words, aligned to 16 bytes, that other threads store; a fence must follow.
TEA_DEVICE uint4 load_relaxed_x4(const uint32_t* from) {
  uint4 x;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(from)
               : "memory");
  return x;
}
TEA_DEVICE void fence_acq_rel_gpu() { asm volatile("fence.acq_rel.gpu;\n" ::: "memory"); }
TEA_DEVICE void add_release(uint32_t& to, uint32_t x) {
  perturb();
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;\n" ::"l"(&to), "r"(x) : "memory");
}
// Adds, and returns the value before. For one thread of a warp: atomicAdd() would be compiled to
// code for a whole warp, after which ptxas uses no uniform registers.
TEA_DEVICE uint32_t fetch_add(uint32_t& to, uint32_t x) {
  uint32_t before;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;\n"
               : "=r"(before)
               : "l"(&to), "r"(x)
               : "memory");
  return before;
}
// Makes a line of 128 bytes undefined, so that L2 need not write it to memory.
TEA_DEVICE void discard_line(const void* line) {
  asm volatile("discard.global.L2 [%0], 128;\n" ::"l"(line) : "memory");
}
// Orders accesses of global memory by the async proxy and by ordinary instructions.
TEA_DEVICE void fence_proxy_async_global() {
  asm volatile("fence.proxy.async.global;\n" ::: "memory");
}

}  // namespace tea::hopper
