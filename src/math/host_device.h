// The macro for definitions that both host and device code use.
#pragma once

#if defined(__CUDACC__)
#define TEA_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define TEA_HOST_DEVICE inline
#endif
