// Launches of this folder's kernels, and the distribution of their work over threads.
#pragma once
#include <algorithm>
#include <bit>

#include "core/driver.h"
#include "gpu/dependent_launch.cuh"
#include "gpu/launch.h"
#include "ops/args.h"

namespace tea {

// The number of CTAs for `threads` threads of work. Kernels use grid-stride loops, so any number is
// correct: the bound limits the strides of the largest tensors, and smaller ones need one step.
inline unsigned blocks_for(int64_t threads, int64_t block = kBlock) {
  constexpr int64_t kMost = int64_t{1} << 22;
  return static_cast<unsigned>(std::clamp<int64_t>((threads + block - 1) / block, 1, kMost));
}

// The number of CTAs that run concurrently, with `on_one` CTAs per SM.
inline unsigned blocks_at_once(const Place& place, int on_one) {
  return static_cast<unsigned>(device_at(place.device).num_sms * on_one);
}

// Launches on the place's device, for any current device.
template <class... Parameters>
void launch(const Launch& how, void (*kernel)(Parameters...), const Place& place,
            Parameters... arguments) {
  const driver::OnDevice here(place.device);
  launch(how, kernel, static_cast<cudaStream_t>(place.stream), arguments...);
}

// Launches with programmatic dependent launch: the kernel may start while its predecessor grid
// runs. See gpu/dependent_launch.cuh.
template <class... Parameters>
void launch_dependent(const Launch& how, void (*kernel)(Parameters...), const Place& place,
                      Parameters... arguments) {
  const driver::OnDevice here(place.device);
  void* addresses[] = {static_cast<void*>(&arguments)...};
  cudaLaunchConfig_t config{};
  config.gridDim = how.grid, config.blockDim = how.block;
  config.dynamicSmemBytes = static_cast<size_t>(how.shared);
  config.stream = static_cast<cudaStream_t>(place.stream);
  require(launch_dependent(reinterpret_cast<const void*>(kernel), config, addresses,
                           device_at(place.device).sm >= 90),
          how.name);
}

// The index of this thread in the grid, and the number of threads.
__device__ __forceinline__ int64_t thread_index() {
  return int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
}
__device__ __forceinline__ int64_t thread_count() { return int64_t{gridDim.x} * blockDim.x; }

// Adjacent threads that share an item of work. Their number is a power of two, because a division
// by it would cost more than many items.
struct Team {
  int shift = 0;

  // The smallest team that does `work` with `each` per thread, but at most `most` threads.
  static Team of(int64_t work, int64_t each, int most) {
    Team team;
    while (team.lanes() < most && team.lanes() * each < work) ++team.shift;
    return team;
  }
  TEA_HOST_DEVICE int lanes() const { return 1 << shift; }
  __device__ int lane() const { return static_cast<int>(threadIdx.x) & (lanes() - 1); }
  // The index of this thread's team in the grid, and the number of teams.
  __device__ int64_t index() const { return thread_index() >> shift; }
  __device__ int64_t count() const { return thread_count() >> shift; }
};

// Checks the metadata of a rule, once each, before its work.
template <class Rule>
__device__ __forceinline__ void run_checks(const Rule& rule) {
  for (int64_t i = thread_index(); i < rule.checks; i += thread_count()) rule.check(i);
}

// The bytes of one access: the common alignment of the OR-ed addresses and distances, at most 16.
inline int access_bytes(uint64_t alignment) { return 1 << std::countr_zero(alignment | 16); }

}  // namespace tea
