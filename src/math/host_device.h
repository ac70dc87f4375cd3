// The one macro that lets a definition serve host and device code alike.
#pragma once

#if defined(__CUDACC__)
#define TEA_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define TEA_HOST_DEVICE inline
#endif
