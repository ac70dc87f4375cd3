// The launch of a decoding kernel.
#pragma once
#include <array>
#include <utility>

#include "hopper/decode/kernel.cuh"
#include "hopper/decode/launch.h"
#include "hopper/row_map.h"

namespace tea::hopper::decode {
namespace {

// TMA serves all keys, or those in pages of a block or more.
template <KernelConfig C>
Outcome encode_maps(LaunchParams& p) {
  using T = Traits<C>;
  const AttentionArguments& a = p.args;
  const bool paged = a.keys.form == TEA_PAGED;
  if (!a.k.data || !a.v.data || (paged && a.keys.page_size < kBlockN)) return {};
  const SequenceLayout layout = paged ? page_rows(a.keys) : a.keys;
  const auto encode = [&](TensorMap* to, const StridedTensor& x, const PageTable& table, int dim) {
    return encode_rows(to, x.data, x, layout, dim, a.heads_kv, paged ? table.pages : a.batch,
                       C.has_fp8_kv ? Type::kE4M3 : C.type, T::kSwizzle, kBlockN);
  };
  if (const int code = encode(&p.k, a.k, a.page_table_k, a.dim_qk))
    return failure(code, "cuTensorMapEncodeTiled of k");
  if (const int code = encode(&p.v, a.v, a.page_table_v, a.dim_v))
    return failure(code, "cuTensorMapEncodeTiled of v");
  p.uses_tma = true;
  p.has_boxes = !paged || (a.keys.page_size % kBlockN == 0 && a.mask.window_left == 0);
  return {};
}

// Whether the plain kernel serves the arguments: see KernelConfig.
inline bool is_plain(const LaunchParams& p) {
  const AttentionArguments& a = p.args;
  return a.is_uniform && a.keys.form == TEA_DENSE && a.queries.form == TEA_DENSE && p.uses_tma &&
         !p.modifies_scores && !p.part_blocks;
}

template <int kTile, Type kType, bool kHasFp8Kv, bool kIsPlain>
Outcome launch_kernel(LaunchParams& p, cudaStream_t stream) {
  constexpr KernelConfig kConfig = kKernelConfig<kTile, kType, kHasFp8Kv, kIsPlain>;
  constexpr int kSharedBytes = sizeof(typename Traits<kConfig>::SharedStorage);
  static OncePerDevice allowed;
  const void* const kernel =
      reinterpret_cast<const void*>(decode_kernel<kTile, kType, kHasFp8Kv, kIsPlain>);
  int sms = 0;
  if (const Outcome ready = prepare_launch(kernel, kSharedBytes, allowed, &sms); ready.code)
    return ready;
  const auto max_ctas = static_cast<int>(limited_ctas(p.args, std::min(sms, kMaxCtas)));
  const int at_once = tiles_at_once(p.tiles, max_ctas);
  p.tiles_at_once = FastDivisor(at_once);
  cudaLaunchConfig_t config = {};
  config.gridDim = std::max(1, num_ctas(kBlockShape, p.args, p.tiles, at_once, max_ctas));
  p.slots = reinterpret_cast<float*>(static_cast<char*>(p.args.workspace) +
                                     flag_bytes(static_cast<int>(config.gridDim.x)));
  config.blockDim = kConfig.tile.threads();
  config.dynamicSmemBytes = kSharedBytes, config.stream = stream;
  void* arguments[] = {&p};
  const cudaError_t code = launch_dependent(kernel, config, arguments, true);
  return code == cudaSuccess ? Outcome{} : failure(code, "the launch of the decoding kernel");
}

template <int kTile, Type kType, bool kHasFp8Kv>
Outcome launch(const KernelParams& params, cudaStream_t stream) {
  constexpr KernelConfig kConfig = kKernelConfig<kTile, kType, kHasFp8Kv>;
  LaunchParams p = {params, false, false, {}, {}};
  if (const Outcome made = encode_maps<kConfig>(p); made.code) return made;
  if constexpr (kConfig.tile.has_plain_kernel && !kHasFp8Kv)
    if (is_plain(p)) return launch_kernel<kTile, kType, kHasFp8Kv, true>(p, stream);
  return launch_kernel<kTile, kType, kHasFp8Kv, false>(p, stream);
}

template <Type kType, bool kHasFp8Kv, int... kTile>
constexpr std::array<Launcher, sizeof...(kTile)> make_launchers(
    std::integer_sequence<int, kTile...>) {
  return {launch<kTile, kType, kHasFp8Kv>...};
}

}  // namespace

template <Type kType>
Launcher find_launcher(bool has_fp8_kv, int tile) {
  static constexpr auto kLaunchers =
      make_launchers<kType, false>(std::make_integer_sequence<int, kNumTiles>());
  static constexpr auto kFp8KvLaunchers =
      make_launchers<kType, true>(std::make_integer_sequence<int, kNumFp8KvTiles>());
  const auto number = static_cast<size_t>(tile);
  return has_fp8_kv ? kFp8KvLaunchers[number] : kLaunchers[number];
}

}  // namespace tea::hopper::decode
