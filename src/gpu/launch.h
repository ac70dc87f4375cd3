// Kernel launches on a stream of the current device, without synchronisation. Errors name the
// kernel.
#pragma once
#include <cuda_runtime_api.h>

#include <string>

#include "core/error.h"
#include "gpu/once.h"

namespace tea {

inline void require(cudaError_t code, const char* what) {
  if (code == cudaSuccess) return;
  cudaGetLastError();  // clears it; otherwise the next launch of this thread would report it again
  throw Error(TEA_FAILED, std::string(what) + ": " + cudaGetErrorString(code));
}

inline constexpr int kBlock = 256;  // threads per CTA unless a kernel specifies another number

struct Launch {
  const char* name;  // of the kernel
  dim3 grid;
  dim3 block = dim3(kBlock);
  int shared = 0;  // bytes of dynamic shared memory
};

template <class... Parameters>
void launch(const Launch& how, void (*kernel)(Parameters...), cudaStream_t stream,
            Parameters... arguments) {
  void* addresses[] = {static_cast<void*>(&arguments)...};
  require(cudaLaunchKernel(kernel, how.grid, how.block, addresses, static_cast<size_t>(how.shared),
                           stream),
          how.name);
}

// Allows a kernel more shared memory than the default, once for each device. This is legal during
// graph capture. `allowed` belongs to the kernel.
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

}  // namespace tea
