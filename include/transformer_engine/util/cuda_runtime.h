/* cuda_runtime.h: properties of the GPU, exported as C++ functions as TransformerEngine does.
   Empty in C. */
#ifndef TRANSFORMER_ENGINE_UTIL_CUDA_RUNTIME_H_
#define TRANSFORMER_ENGINE_UTIL_CUDA_RUNTIME_H_

#ifdef __cplusplus
#pragma GCC visibility push(default)

namespace transformer_engine::cuda {

// The index of the calling thread's GPU. These three functions throw std::runtime_error without a
// GPU.
int current_device();
// The compute capability, as 10 * major + minor; of the current device if the index is -1.
int sm_arch(int device_id = -1);
// The number of SMs; of the current device if the index is -1.
int sm_count(int device_id = -1);

}  // namespace transformer_engine::cuda

#pragma GCC visibility pop
#endif
#endif
