// The launchers of the forward kernels, one for each kernel that exists.
#pragma once
#include <cuda_runtime.h>

#include "gpu/once.h"
#include "hopper/forward/config.h"
#include "hopper/forward/forward.h"

namespace tea::hopper {

using Launcher = Outcome (*)(const AttentionArguments&, const Selection&, cudaStream_t);

// The launcher of a kernel; null if it is not instantiated. Each variant is defined in a source
// file of its own (instances/), so that they compile in parallel.
template <Variant kVariant>
Launcher find_launcher(int tile, Type type);

// A number that no launch of the process had before, and that uninitialised memory is unlikely to
// hold; never 0.
uint64_t next_launch_number();

// The codes of the driver API are those of the runtime API.
inline Outcome failure(int code, const char* what) {
  return {code, what, cudaGetErrorString(static_cast<cudaError_t>(code))};
}
inline Outcome refusal(const char* what) { return failure(cudaErrorInvalidValue, what); }

// Allows a kernel its dynamic shared memory, once for each device, or asks for all of L1 if it has
// none: by default the driver leaves an SM as the predecessor grid had it, and with a small L1 few
// loads can be under way. Sets the number of SMs of the current device. `allowed` belongs to
// the kernel.
inline Outcome prepare_launch(const void* kernel, int shared_bytes, OncePerDevice& allowed,
                              int* sms) {
  int device = 0;
  cudaError_t code = cudaGetDevice(&device);
  if (code != cudaSuccess) return failure(code, "cudaGetDevice");
  code = cudaDeviceGetAttribute(sms, cudaDevAttrMultiProcessorCount, device);
  if (code != cudaSuccess) return failure(code, "cudaDeviceGetAttribute");
  if (allowed.done(device)) return {};
  code =
      shared_bytes > 0
          ? cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes)
          : cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                 cudaSharedmemCarveoutMaxL1);
  if (code != cudaSuccess) return failure(code, "cudaFuncSetAttribute");
  allowed.mark(device);
  return {};
}

}  // namespace tea::hopper
