// How kernels are launched: on a stream of the current device, without a synchronisation, with
// errors under the kernel's name.
#pragma once
#include <cuda_runtime_api.h>

#include <string>

#include "core/error.h"
#include "gpu/once.h"

namespace tea {

inline void require(cudaError_t code, const char* what) {
  if (code == cudaSuccess) return;
  cudaGetLastError();  // or the next launch in this thread, whose ever it is, reports it again
  throw Error(TEA_FAILED, std::string(what) + ": " + cudaGetErrorString(code));
}

inline constexpr int kBlock = 256;  // threads, where a kernel asks for no other number

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

}  // namespace tea
