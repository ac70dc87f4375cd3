// The launch of a decoding kernel.
#pragma once
#include <array>
#include <utility>

#include "hopper/decode/kernel.cuh"
#include "hopper/decode/launch.h"

namespace tea::hopper::decode {
namespace {

template <int kTile, Type kType>
Outcome launch(KernelParams& p, cudaStream_t stream) {
  constexpr int kSharedBytes = sizeof(typename Traits<kKernelConfig<kTile, kType>>::SharedStorage);
  static OncePerDevice allowed;
  const void* const kernel = reinterpret_cast<const void*>(decode_kernel<kTile, kType>);
  int sms = 0;
  if (const Outcome ready = prepare_launch(kernel, kSharedBytes, allowed, &sms); ready.code)
    return ready;
  cudaLaunchConfig_t config = {};
  config.gridDim = std::max(1, Shares(max_blocks(p.args), std::min(sms, kMaxCtas)).ctas);
  config.blockDim = kTiles[kTile].threads();
  config.dynamicSmemBytes = kSharedBytes, config.stream = stream;
  void* arguments[] = {&p};
  const cudaError_t code = launch_dependent(kernel, config, arguments, true);
  return code == cudaSuccess ? Outcome{} : failure(code, "the launch of the decoding kernel");
}

template <Type kType, int... kTile>
constexpr std::array<Launcher, kNumTiles> make_launchers(std::integer_sequence<int, kTile...>) {
  return {launch<kTile, kType>...};
}

}  // namespace

template <Type kType>
Launcher find_launcher(int tile) {
  static constexpr auto kLaunchers =
      make_launchers<kType>(std::make_integer_sequence<int, kNumTiles>());
  return kLaunchers[static_cast<size_t>(tile)];
}

}  // namespace tea::hopper::decode
