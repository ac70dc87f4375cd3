// The launch of a kernel with one tile per CTA: kernel.cuh and dq_kernel.cu.
#pragma once
#include <array>
#include <cstddef>
#include <utility>

#include "gpu/launch.h"
#include "gpu/warp.cuh"
#include "portable/backward/config.h"
#include "portable/backward/launch.h"
#include "portable/grid.h"

namespace tea::portable {
namespace {

// One CTA for every `block` of `rows`, every head and every batch entry. how.grid is set later.
void launch_tiles(Launch how, void (*kernel)(BackwardParams), OncePerDevice& allowed,
                  const BackwardArguments& work, int64_t rows, int block, int heads,
                  cudaStream_t stream) {
  const int64_t tiles = (rows + block - 1) / block, ctas = tiles * heads * work.args.batch;
  if (ctas == 0) return;
  allow_shared(how, kernel, allowed);
  BackwardParams p{work, static_cast<unsigned>(tiles), work.args.scale * kLog2E};
  launch_grids(how, kernel, p, work.args, ctas, stream);
}

using BackwardLauncher = void (*)(const BackwardArguments&, cudaStream_t);

template <template <int, int> class Kernel, int kDtype, int kFirst, int... kTile>
constexpr std::array<BackwardLauncher, sizeof...(kTile)> make_launchers(
    std::integer_sequence<int, kTile...>) {
  return {Kernel<kFirst + kTile, kDtype>::run...};
}

// The launcher of the configuration for the operand type: Kernel<tile, dtype>::run. Compiles the
// kernels of kCount configurations from kFirst on, of which `tile` must be one.
template <template <int, int> class Kernel, int kFirst, int kCount>
BackwardLauncher find_launcher(int tile, const AttentionArguments& args) {
  constexpr auto kTiles = std::make_integer_sequence<int, kCount>();
  static constexpr auto kBf16 = make_launchers<Kernel, TEA_BF16, kFirst>(kTiles);
  static constexpr auto kFp16 = make_launchers<Kernel, TEA_FP16, kFirst>(kTiles);
  return (operand_dtype(args) == TEA_FP16 ? kFp16 : kBf16)[static_cast<size_t>(tile - kFirst)];
}

}  // namespace
}  // namespace tea::portable
