// Programmatic dependent launch, from sm_90 on: a kernel starts while its predecessor on the stream
// still runs, so that the work before its first dependency overlaps with the predecessor.
#pragma once
#include <cuda_runtime_api.h>

#include "gpu/ptx.cuh"

namespace tea {

// A dependent grid may start once every CTA of its predecessor has called launch_dependent_grids()
// or exited, and must call wait_on_dependent_grids() before it reads or overwrites anything that
// the predecessor touches, at the latest before it exits. PTX promises visibility after that wait
// alone; the backward pass on Hopper reads counters and flags earlier, by loads that L2 serves, of
// what its predecessor wrote ahead of a fence and of launch_dependent_grids(). `overlap` requires
// sm_90; without it the grid starts when the predecessor has finished.
inline cudaError_t launch_dependent(const void* kernel, cudaLaunchConfig_t config, void** arguments,
                                    bool overlap) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute, config.numAttrs = overlap;
  return cudaLaunchKernelExC(&config, kernel, arguments);
}

// Called by at least one thread of each CTA. Writes of this grid are visible to the dependent grid
// after its wait_on_dependent_grids(), whether they precede or follow this call.
TEA_DEVICE void launch_dependent_grids() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
// Waits until the predecessor has finished and its writes are visible. Called by every thread whose
// work depends on the predecessor, unless the thread synchronises with one that has called it.
TEA_DEVICE void wait_on_dependent_grids() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace tea
