// Common parts of the tests of device primitives: counting, buffers on the device, random values.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "hopper/apart.h"

namespace tea::primitives {

inline int passed = 0, failed = 0;

// Counts one check, and prints it if it failed.
inline void expect(bool ok, const std::string& what) {
  ++(ok ? passed : failed);
  if (!ok) printf("FAILED %s\n", what.c_str());
}

// Waits for the device; a failed launch or a fault ends the process, since nothing works after it.
inline void finish(const std::string& what) {
  const cudaError_t launch = cudaGetLastError(), run = cudaDeviceSynchronize();
  if (launch == cudaSuccess && run == cudaSuccess) return restart_limit();
  printf("FAILED %s: %s\n%d passed, %d failed and the rest of the group not run\n", what.c_str(),
         cudaGetErrorString(launch != cudaSuccess ? launch : run), passed, failed + 1);
  exit(1);
}

template <class T>
struct Buffer {
  T* data = nullptr;
  size_t size;

  explicit Buffer(size_t n) : size(n) {
    if (cudaMalloc(&data, n * sizeof(T)) != cudaSuccess) finish("allocation");
    cudaMemset(data, 0xA5, n * sizeof(T));  // poison: an element never written shows
  }
  explicit Buffer(const std::vector<T>& v) : Buffer(v.size()) {
    cudaMemcpy(data, v.data(), size * sizeof(T), cudaMemcpyHostToDevice);
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { cudaFree(data); }

  std::vector<T> read() const {
    std::vector<T> v(size);
    cudaMemcpy(v.data(), data, size * sizeof(T), cudaMemcpyDeviceToHost);
    return v;
  }
};

inline std::mt19937& generator() {
  static std::mt19937 g(20240711);
  return g;
}
inline int random_int(int from, int to) {
  return std::uniform_int_distribution<int>(from, to)(generator());
}
inline float random_normal() { return std::normal_distribution<float>()(generator()); }

inline std::vector<uint8_t> random_bytes(size_t n) {
  std::vector<uint8_t> v(n);
  for (uint8_t& b : v) b = static_cast<uint8_t>(random_int(1, 255));  // never zero, as fill is
  return v;
}

// Launches with dynamic shared memory beyond the default.
template <class... KernelParams, class... Arguments>
void launch(void (*kernel)(KernelParams...), int blocks, int threads, int shared,
            Arguments&&... a) {
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  kernel<<<blocks, threads, shared>>>(std::forward<Arguments>(a)...);
}

void test_ptx();
void test_barriers();
void test_loads();
void test_copies();
void test_matrices();
void test_tiles();
void test_schedules();

}  // namespace tea::primitives
