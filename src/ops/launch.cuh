// How kernels of this folder are launched, and how they share their work among threads.
#pragma once
#include <algorithm>
#include <bit>

#include "core/driver.h"
#include "gpu/dependent_launch.cuh"
#include "gpu/launch.h"
#include "ops/args.h"

namespace tea {

// Blocks for so many threads of work. A kernel strides over its work, so that less is right too:
// the bound keeps the strides of the largest tensors in range, the smaller ones run in one go.
inline unsigned blocks_for(int64_t threads, int64_t block = kBlock) {
  constexpr int64_t kMost = int64_t{1} << 22;
  return static_cast<unsigned>(std::clamp<int64_t>((threads + block - 1) / block, 1, kMost));
}

// With so many on a multiprocessor.
inline unsigned blocks_at_once(const Place& place, int on_one) {
  return static_cast<unsigned>(device_at(place.device).multiprocessors * on_one);
}

// On the place's device, whichever is current.
template <class... Parameters>
void launch(const Launch& how, void (*kernel)(Parameters...), const Place& place,
            Parameters... arguments) {
  const driver::OnDevice here(place.device);
  launch(how, kernel, static_cast<cudaStream_t>(place.stream), arguments...);
}

// The same, but the kernel may begin while the one before it on the stream still runs: see
// gpu/dependent_launch.cuh.
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

// This thread among all, and how many there are.
__device__ __forceinline__ int64_t thread_index() {
  return int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
}
__device__ __forceinline__ int64_t thread_count() { return int64_t{gridDim.x} * blockDim.x; }

// Neighbouring threads that share an item of work: a power of two, for a division by their number
// would cost more than many an item.
struct Team {
  int shift = 0;

  // As few as do `work` in shares of `each`, but at most `most`.
  static Team of(int64_t work, int64_t each, int most) {
    Team team;
    while (team.lanes() < most && team.lanes() * each < work) ++team.shift;
    return team;
  }
  TEA_HOST_DEVICE int lanes() const { return 1 << shift; }
  __device__ int lane() const { return static_cast<int>(threadIdx.x) & (lanes() - 1); }
  // The team of this thread among all, and how many there are.
  __device__ int64_t index() const { return thread_index() >> shift; }
  __device__ int64_t count() const { return thread_count() >> shift; }
};

// The metadata of a rule, once each, before its work.
template <class Rule>
__device__ __forceinline__ void run_checks(const Rule& rule) {
  for (int64_t i = thread_index(); i < rule.checks; i += thread_count()) rule.check(i);
}

// The bytes of one access: what addresses and distances, OR-ed, have in common; 16 at most.
inline int access_bytes(uint64_t alignment) { return 1 << std::countr_zero(alignment | 16); }

}  // namespace tea
