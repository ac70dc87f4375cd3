// Kernels that begin while the one before them on the stream still runs, from sm_90 on
// (programmatic dependent launch): what they do before they need that one costs no time.
#pragma once
#include <cuda_runtime_api.h>

#include "gpu/ptx.cuh"

namespace tea {

// Such a kernel begins once every block of the one before has called let_next_begin() or ended; it
// calls wait_for_kernel_before() ahead of all that depends on that one, at the latest before it
// ends. early: from sm_90 on; else it begins when the other ended.
inline cudaError_t launch_early(const void* kernel, cudaLaunchConfig_t config, void** arguments,
                                bool early) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute, config.numAttrs = early;
  return cudaLaunchKernelExC(&config, kernel, arguments);
}

// By one thread of each block, or more; what this kernel writes is seen where the next one waited.
TEA_DEVICE void let_next_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
// By every thread whose work depends on the kernel before, or on a thread that has waited.
TEA_DEVICE void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace tea
