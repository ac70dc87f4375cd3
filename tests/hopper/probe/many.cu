// A shared library of many kernels of the size of real ones, its runtime linked statically: what
// does its first call cost? first_call() returns the milliseconds of one kernel's first launch.
#include <cuda_runtime.h>

#include <array>
#include <utility>

#include "hopper/probe/probe.h"

namespace tea::probe {
namespace {

constexpr int kKernels = 120;

// Straight-line code that depends on kWhich, so that no two kernels share any.
template <int kWhich>
__global__ void chain(float* x) {
  float v = x[threadIdx.x], w = x[threadIdx.x + 32];
#pragma unroll
  for (int i = 0; i < 512; ++i) {
    v = fmaf(v, w, static_cast<float>(kWhich + i));
    w = fmaf(w, v, static_cast<float>(kWhich - 3 * i));
  }
  x[threadIdx.x] = v + w;
}

using Kernel = void (*)(float*);
template <size_t... kWhich>
constexpr std::array<Kernel, kKernels> all(std::index_sequence<kWhich...>) {
  return {chain<kWhich>...};
}
constexpr auto kAll = all(std::make_index_sequence<kKernels>());

}  // namespace
}  // namespace tea::probe

extern "C" double first_call(int which) {
  using namespace tea::probe;
  float* x;
  must(cudaMalloc(&x, 256), "allocation");
  const double start = now_ns();
  kAll[which]<<<1, 32>>>(x);
  must(cudaDeviceSynchronize(), "first launch");
  return (now_ns() - start) / 1e6;
}
extern "C" double make_context() {
  const double start = tea::probe::now_ns();
  tea::probe::must(cudaFree(nullptr), "context");
  return (tea::probe::now_ns() - start) / 1e6;
}
