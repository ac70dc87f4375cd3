// The launch of a forward kernel.
#pragma once
#include <array>
#include <utility>

#include "portable/forward/kernel.cuh"
#include "portable/forward/launch.h"
#include "portable/grid.h"

namespace tea::portable {
namespace {

template <Variant kVariant, int kTile>
void launch_forward(KernelParams& p, int64_t ctas, cudaStream_t stream) {
  static OncePerDevice allowed;
  using T = Traits<kKernelConfig<kVariant, kTile>>;
  const Launch how{"forward", {}, T::kThreads, sizeof(typename T::SharedStorage)};
  allow_shared(how, forward_kernel<kVariant, kTile>, allowed);
  launch_grids(how, forward_kernel<kVariant, kTile>, p, p.args, ctas, stream);
}

template <Variant kVariant, int... kTile>
constexpr std::array<Launcher, sizeof...(kTile)> make_launchers(
    std::integer_sequence<int, kTile...>) {
  return {launch_forward<kVariant, kTile>...};
}

}  // namespace

template <Variant kVariant>
Launcher find_launcher(int tile) {
  constexpr auto kAllTiles = std::make_integer_sequence<int, num_tiles(kVariant)>();
  static constexpr auto kLaunchers = make_launchers<kVariant>(kAllTiles);
  return kLaunchers[static_cast<size_t>(tile)];
}

}  // namespace tea::portable
