// Kernels between the launches under test: they let the next launch begin at once and then take
// their time, so that a launch which does not wait for its predecessor shows.
#pragma once
#include "gpu/dependent_launch.cuh"
#include "hopper/primitives.h"

namespace tea::primitives {

static __device__ void dawdle() {
  launch_dependent_grids();
  for (int i = 0; i < 20; ++i) __nanosleep(1000);
}

static __global__ void count_differences(const uint16_t* a, const uint16_t* b, size_t n, int* count,
                                         bool slowly = false) {
  if (slowly) dawdle();
  const size_t step = size_t{gridDim.x} * blockDim.x;
  for (size_t i = size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n; i += step)
    if (a[i] != b[i]) atomicAdd(count, 1);
}

// Copies of a multiple of eight bytes each.
struct Copy {
  char* to;
  const char* from;
  size_t bytes;
};
template <class T>
Copy copy(const Buffer<T>& to, const Buffer<T>& from) {
  return {reinterpret_cast<char*>(to.data), reinterpret_cast<const char*>(from.data),
          to.size * sizeof(T)};
}
struct Copies {
  Copy all[8];
};
static __global__ void bring(Copies copies) {
  dawdle();
  const size_t step = size_t{gridDim.x} * blockDim.x * 8;
  for (const Copy& c : copies.all)
    for (size_t i = (size_t{blockIdx.x} * blockDim.x + threadIdx.x) * 8; i < c.bytes; i += step)
      *reinterpret_cast<uint64_t*>(c.to + i) = *reinterpret_cast<const uint64_t*>(c.from + i);
}

}  // namespace tea::primitives
