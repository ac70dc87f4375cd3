// How kernels of this engine are launched: on a stream of the current device, with errors under the
// kernel's name.
#pragma once
#include <cuda_runtime.h>

#include <string>

#include "core/error.h"
#include "gpu/once.h"

namespace tea::portable {

inline void require(cudaError_t code, const char* what) {
  if (code == cudaSuccess) return;
  cudaGetLastError();  // or the next launch in this thread, whose ever it is, reports it again
  throw Error(TEA_FAILED, std::string(what) + ": " + cudaGetErrorString(code));
}

struct Launch {
  const char* name;  // of the kernel
  dim3 grid;
  int threads;
  int shared = 0;  // bytes of dynamic shared memory
};

template <class Parameters>
void launch(const Launch& how, void (*kernel)(Parameters), Parameters parameters,
            cudaStream_t stream) {
  void* addresses[] = {&parameters};
  const dim3 block(static_cast<unsigned>(how.threads));
  require(
      cudaLaunchKernel(kernel, how.grid, block, addresses, static_cast<size_t>(how.shared), stream),
      how.name);
}

// More shared memory than a kernel has by default, asked for once for each device, which is legal
// while a graph is being captured. `allowed` belongs to the kernel.
template <class Parameters>
void allow_shared(const Launch& how, void (*kernel)(Parameters), OncePerDevice& allowed) {
  int device = 0;
  require(cudaGetDevice(&device), "cudaGetDevice");
  allowed.run(device, [&] {
    require(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, how.shared),
            how.name);
    require(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                 cudaSharedmemCarveoutMaxShared),
            how.name);
  });
}

}  // namespace tea::portable
