// How a pass of backward over tiles is launched: a kernel for each row of its table and each type
// of 16 bits, and the choice of one. A file that has such a pass describes it as a Pass:
//   table, name             the rows, each with general and dim; the kernels' name in errors
//   Parameters              of its kernels: the work, how many tiles a sequence has, scale_log2
//   Kernel<number>          of row number / 2: bf16 if the number is even, else fp16
//   tiles<Kernel>(Work)     of a sequence
//   heads(Work)             over which a block's tile repeats
#pragma once
#include <algorithm>
#include <array>
#include <iterator>
#include <utility>

#include "gpu/launch.h"
#include "gpu/warp.cuh"
#include "portable/backward_passes.h"

namespace tea::portable {
namespace {

// Named by a number: see hopper/forward_launch.cuh.
template <class Pass, int kNumber>
__global__ void __launch_bounds__(Pass::template Kernel<kNumber>::kThreads)
    entry(const __grid_constant__ typename Pass::Parameters p) {
  Pass::template Kernel<kNumber>::body(p);
}

template <class Pass, int kNumber>
void launch_tiles(const BackwardArguments& work, cudaStream_t stream) {
  static OncePerDevice allowed;
  using K = typename Pass::template Kernel<kNumber>;
  using Parameters = typename Pass::Parameters;
  const AttentionArguments& args = work.args;
  const int64_t tiles = Pass::template tiles<K>(args),
                blocks = tiles * Pass::heads(args) * args.batch;
  if (blocks == 0) return;
  const Launch how{Pass::name, static_cast<unsigned>(blocks), K::kThreads,
                   sizeof(typename K::Smem)};
  allow_shared(how, entry<Pass, kNumber>, allowed);
  launch(how, entry<Pass, kNumber>, stream,
         Parameters{work, static_cast<decltype(Parameters::tiles)>(tiles), args.scale * kLog2E});
}

template <class Pass>
struct Choice {
  std::decay_t<decltype(Pass::table[0])> row;
  int shared;
  void (*bf16)(const BackwardArguments&, cudaStream_t);
  void (*fp16)(const BackwardArguments&, cudaStream_t);

  void run(const BackwardArguments& work, cudaStream_t stream) const {
    (tile_type(work.args) == TEA_FP16 ? fp16 : bf16)(work, stream);
  }
};
template <class Pass, int kRow>
constexpr Choice<Pass> choice() {
  return {Pass::table[kRow], sizeof(typename Pass::template Kernel<2 * kRow>::Smem),
          launch_tiles<Pass, 2 * kRow>, launch_tiles<Pass, 2 * kRow + 1>};
}
template <class Pass, int... kRow>
constexpr std::array<Choice<Pass>, sizeof...(kRow)> choices(std::integer_sequence<int, kRow...>) {
  return {choice<Pass, kRow>()...};
}
template <class Pass>
constexpr auto kChoices =
    choices<Pass>(std::make_integer_sequence<int, int{std::size(Pass::table)}>());

// The first row that `serves` and is large enough; null: none.
template <class Pass, class Serves>
const Choice<Pass>* choose(const AttentionArguments& args, const Device& device,
                           const Serves& serves) {
  if (tile_type(args) == TEA_FP32) return nullptr;
  const int dim = std::max(args.dim_qk, args.dim_v);
  const auto fits = [&](const Choice<Pass>& c) {
    return serves(c.row) && dim <= c.row.dim && c.shared <= device.shared_bytes;
  };
  const auto& all = kChoices<Pass>;
  const auto* const found = std::find_if(all.begin(), all.end(), fits);
  return found == all.end() ? nullptr : found;
}

}  // namespace
}  // namespace tea::portable
