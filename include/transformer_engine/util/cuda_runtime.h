/* cuda_runtime.h: questions about the GPU that TransformerEngine exports as C++ functions. */
#ifndef TRANSFORMER_ENGINE_UTIL_CUDA_RUNTIME_H_
#define TRANSFORMER_ENGINE_UTIL_CUDA_RUNTIME_H_

#ifdef __cplusplus
namespace transformer_engine {
namespace cuda {

#if defined(__GNUC__)
#pragma GCC visibility push(default)
#endif
// The index of the calling thread's GPU. These three throw std::runtime_error without one; this
// build, whose engines run on the host, never has one.
int current_device();
// The compute capability, as 10 * major + minor; the current device if the index is -1.
int sm_arch(int device_id = -1);
// The number of multiprocessors; the current device if the index is -1.
int sm_count(int device_id = -1);
#if defined(__GNUC__)
#pragma GCC visibility pop
#endif

}  // namespace cuda
}  // namespace transformer_engine
#endif
#endif
