// Launches of the forward pass: shared memory beyond the default is asked for once for each device,
// which is legal while a graph is being captured.
#pragma once
#include <algorithm>
#include <string>
#include <utility>

#include "core/error.h"
#include "portable/device/forward.cuh"
#include "portable/once.h"

namespace tea::portable {

inline void require(cudaError_t code, const char* what) {
  if (code != cudaSuccess)
    throw Error(TEA_FAILED, std::string(what) + ": " + cudaGetErrorString(code));
}

// Grids are at most this long; a larger problem takes several launches.
inline constexpr int64_t kLongest = int64_t{1} << 30;

template <class Kernel>
void launch_all(Kernel* kernel, Parameters& p, int64_t blocks, int threads, size_t shared,
                cudaStream_t stream) {
  for (p.first_block = 0; p.first_block < blocks; p.first_block += kLongest) {
    const auto grid = static_cast<unsigned>(std::min(kLongest, blocks - p.first_block));
    kernel<<<grid, threads, shared, stream>>>(p);
    require(cudaGetLastError(), "launching the forward pass");
  }
}

// Once for each device: more shared memory than a kernel has by default.
template <int kNumber>
void prepare() {
  static OncePerDevice prepared;
  int device = 0;
  require(cudaGetDevice(&device), "cudaGetDevice");
  prepared.run(device, [] {
    const auto kernel = forward_entry<kNumber>;
    constexpr int kShared = sizeof(typename Kernel<kNumber>::Smem);
    require(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared),
            "cudaFuncSetAttribute");
    require(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                 cudaSharedmemCarveoutMaxShared),
            "cudaFuncSetAttribute");
  });
}

template <int kNumber>
void launch(Parameters& p, int64_t blocks, cudaStream_t stream) {
  prepare<kNumber>();
  using K = Kernel<kNumber>;
  launch_all(forward_entry<kNumber>, p, blocks, K::kThreads, sizeof(typename K::Smem), stream);
}

// Launches `number` if it is a kernel of the variant.
template <Variant kVariant, int... kRow>
bool launch_row(std::integer_sequence<int, kRow...>, int number, Parameters& p, int64_t blocks,
                cudaStream_t stream) {
  return ((number == kRow * kVariants + kVariant &&
           (launch<kRow * kVariants + kVariant>(p, blocks, stream), true)) ||
          ...);
}
template <Variant... kOneOf>
void launch_variants(int number, Parameters& p, int64_t blocks, cudaStream_t stream) {
  constexpr auto kAllRows = std::make_integer_sequence<int, kRows>();
  (launch_row<kOneOf>(kAllRows, number, p, blocks, stream) || ...);
}

}  // namespace tea::portable
