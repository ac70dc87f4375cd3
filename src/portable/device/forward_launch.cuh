// Launches of the forward pass: kernels by their number in the table, grids of any length.
#pragma once
#include <algorithm>
#include <utility>

#include "gpu/launch.h"
#include "portable/device/forward.cuh"

namespace tea::portable {

// Grids are at most this long; a larger problem takes several launches.
inline constexpr int64_t kLongest = int64_t{1} << 30;

inline void launch_all(Launch how, void (*kernel)(Parameters), Parameters& p, int64_t blocks,
                       cudaStream_t stream) {
  for (p.first_block = 0; p.first_block < blocks; p.first_block += kLongest) {
    how.grid = static_cast<unsigned>(std::min(kLongest, blocks - p.first_block));
    launch(how, kernel, stream, p);
  }
}

template <int kNumber>
void launch_number(Parameters& p, int64_t blocks, cudaStream_t stream) {
  static OncePerDevice allowed;
  using K = Kernel<kNumber>;
  const Launch how{"forward", {}, K::kThreads, sizeof(typename K::Smem)};
  allow_shared(how, forward_entry<kNumber>, allowed);
  launch_all(how, forward_entry<kNumber>, p, blocks, stream);
}

// Launches `number` if it is a kernel of the variant.
template <Variant kVariant, int... kRow>
bool launch_row(std::integer_sequence<int, kRow...>, int number, Parameters& p, int64_t blocks,
                cudaStream_t stream) {
  return ((number == kRow * kVariants + kVariant &&
           (launch_number<kRow * kVariants + kVariant>(p, blocks, stream), true)) ||
          ...);
}
template <Variant... kOneOf>
void launch_variants(int number, Parameters& p, int64_t blocks, cudaStream_t stream) {
  constexpr auto kAllRows = std::make_integer_sequence<int, kRows>();
  (launch_row<kOneOf>(kAllRows, number, p, blocks, stream) || ...);
}

}  // namespace tea::portable
