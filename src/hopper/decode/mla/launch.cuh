// The launches of the MLA kernels.
#pragma once
#include "hopper/decode/launch.h"
#include "hopper/decode/mla/combine.cuh"
#include "hopper/decode/mla/kernel.cuh"
#include "hopper/row_map.h"

namespace tea::hopper::decode::mla {
namespace {

template <Type kType>
Outcome encode_maps(LaunchParams& p) {
  const AttentionArguments& a = p.args;
  const bool paged = a.keys.form == TEA_PAGED;
  if (!a.k.data || !a.v.data || p.gathers) return {};  // no keys, or no boxes
  const SequenceLayout layout = paged ? page_rows(a.keys) : a.keys;
  const auto encode = [&](TensorMap* to, const StridedTensor& x, const PageTable& table, int dim) {
    return encode_rows(to, x.data, x, layout, dim, a.heads_kv, paged ? table.pages : a.batch, kType,
                       kSwizzle, box_rows(a));
  };
  if (const int code = encode(&p.k, a.k, a.page_table_k, a.dim_qk))
    return failure(code, "cuTensorMapEncodeTiled of k");
  if (const int code = encode(&p.v, a.v, a.page_table_v, a.dim_v))
    return failure(code, "cuTensorMapEncodeTiled of v");
  return {};
}

template <Type kType>
Outcome launch_combine(LaunchParams& p, int sms, cudaStream_t stream) {
  cudaLaunchConfig_t config = {};
  config.gridDim = static_cast<unsigned>(limited_ctas(p.args, sms * kCombineCtasPerSm));
  config.blockDim = kCombineThreads, config.stream = stream;
  void* arguments[] = {&p};
  const cudaError_t code = launch_dependent(
      reinterpret_cast<const void*>(mla_combine_kernel<kType>), config, arguments, true);
  return code == cudaSuccess ? Outcome{} : failure(code, "the launch of the combining MLA kernel");
}

}  // namespace

template <Type kType>
Outcome launch(const KernelParams& params, cudaStream_t stream) {
  static OncePerDevice allowed[2];
  LaunchParams p = {};
  static_cast<KernelParams&>(p) = params;
  const AttentionArguments& a = p.args;
  p.gathers = box_rows(a) == 1, p.shares_kv = shares_kv(a);
  const bool shared_kv_boxes = p.shares_kv && !p.gathers;
  const auto run =
      shared_kv_boxes ? mla_decode_kernel<kType, true> : mla_decode_kernel<kType, false>;
  const void* const kernel = reinterpret_cast<const void*>(run);
  int sms = 0;
  if (const Outcome ready =
          prepare_launch(kernel, sizeof(SharedStorage), allowed[shared_kv_boxes], &sms);
      ready.code)
    return ready;
  if (const Outcome made = encode_maps<kType>(p); made.code) return made;
  p.row_tiles = FastDivisor(row_tiles(a));
  p.tiles = a.heads_kv * p.row_tiles;
  while (2 << p.box_rows_log2 <= box_rows(a)) ++p.box_rows_log2;
  const auto max_ctas = static_cast<int>(limited_ctas(a, std::min(sms, kMaxCtas)));
  const int at_once = tiles_at_once(p.tiles, max_ctas);
  p.tiles_at_once = FastDivisor(at_once);
  cudaLaunchConfig_t config = {};
  config.gridDim = std::max(1, num_ctas(kBlockShape, a, p.tiles, at_once, max_ctas));
  p.ctas = static_cast<int>(config.gridDim.x);
  if (may_divide_tiles<kBlockShape>(p, p.ctas)) {
    p.divided_tiles = static_cast<DividedTile*>(a.workspace);
    p.slots =
        reinterpret_cast<float*>(static_cast<char*>(a.workspace) + divided_tile_bytes(p.ctas));
  }
  config.blockDim = kThreads;
  config.dynamicSmemBytes = sizeof(SharedStorage), config.stream = stream;
  void* arguments[] = {&p};
  const cudaError_t code = launch_dependent(kernel, config, arguments, true);
  if (code != cudaSuccess) return failure(code, "the launch of the MLA kernel");
  return p.divided_tiles ? launch_combine<kType>(p, sms, stream) : Outcome{};
}

}  // namespace tea::hopper::decode::mla
