// The launch of a forward kernel: tensor maps, parameters, grid.
#pragma once
#include <algorithm>
#include <array>
#include <utility>

#include "hopper/forward/kernel.cuh"
#include "hopper/forward/launch.h"
#include "hopper/row_map.h"

namespace tea::hopper {
namespace {

// Encodes the map of a bias, with one dimension for each index; an index over which the bias is
// broadcast has one element. rows: BiasTile::rows, 0 where TMA cannot address the bias.
int encode_bias(TensorMap* to, int* rows, const AttentionArguments& a, Type type) {
  const tea_bias_strides& stride = a.bias.stride;
  const auto fits = [](int64_t stride) { return stride % 8 == 0 && stride < int64_t{1} << 39; };
  const bool aligned = reinterpret_cast<uintptr_t>(a.bias.data) % 16 == 0;
  *rows = 0;
  if (a.bias.dtype == TEA_FP32 || stride.col != 1 || !aligned || !fits(stride.row) ||
      !fits(stride.head) || !fits(stride.batch) || a.keys.max_seqlen == 0)
    return 0;
  *rows = stride.row ? 64 : 1;
  const auto extent = [](int64_t stride, int64_t n) {
    return static_cast<uint64_t>(stride ? std::max<int64_t>(n, 1) : 1);
  };
  const auto bytes = [](int64_t stride) { return static_cast<uint64_t>(stride ? stride : 8) * 2; };
  const MapShape shape = {type,
                          BiasTile::kSwizzle,
                          4,
                          {extent(1, a.keys.max_seqlen), extent(stride.row, a.queries.max_seqlen),
                           extent(stride.head, a.heads_q), extent(stride.batch, a.batch)},
                          {0, bytes(stride.row), bytes(stride.head), bytes(stride.batch)},
                          {uint32_t{BiasTile::kColumns}, static_cast<uint32_t>(*rows), 1, 1}};
  return encode(to, a.bias.data, shape);
}

// Fails if TMA cannot address a tensor.
template <KernelConfig C>
Outcome encode_maps(KernelParams* p, const AttentionArguments& a) {
  const int box = C.paged() ? 1 << p->box_rows_log2 : Traits<C>::kBlockN;
  const SequenceLayout keys = C.paged() ? page_rows(a.keys) : a.keys;
  const int64_t batch_k = C.paged() ? a.page_table_k.pages : a.batch,
                batch_v = C.paged() ? a.page_table_v.pages : a.batch;
  const struct {
    const char* what;
    TensorMap* to;
    const StridedTensor& x;
    const SequenceLayout& layout;
    int64_t batch;
    int dim, heads, box_rows;
  } tensors[] = {
      {"cuTensorMapEncodeTiled of q", &p->q, a.q, a.queries, a.batch, a.dim_qk, a.heads_q, 64},
      {"cuTensorMapEncodeTiled of k", &p->k, a.k, keys, batch_k, a.dim_qk, a.heads_kv, box},
      {"cuTensorMapEncodeTiled of v", &p->v, a.v, keys, batch_v, a.dim_v, a.heads_kv, box},
      {"cuTensorMapEncodeTiled of o", &p->o, a.o, a.queries, a.batch, a.dim_v, a.heads_q, 64},
  };
  for (const auto& t : tensors) {
    if (t.to == &p->o && !stores_by_tma<C>(a)) continue;
    // An empty tensor may be NULL. Nothing of it is read, but a map needs an address.
    const void* const data = t.x.data ? t.x.data : a.q.data;
    const int code = encode_rows(t.to, data, t.x, t.layout, t.dim, t.heads, t.batch, C.type,
                                 Traits<C>::kSwizzle, t.box_rows);
    if (code) return failure(code, t.what);
  }
  if constexpr (C.paged()) {
    const auto encode_first = [&](TensorMap* to, const StridedTensor& x, int64_t pages, int dim) {
      // From the first row: encode_rows() starts a box before the data that it is given.
      const char* const data = static_cast<const char*>(x.data ? x.data : a.q.data);
      return encode_rows(to, data + box * x.seq * 2, x, keys, dim, a.heads_kv, pages, C.type,
                         Traits<C>::kSwizzle, box);
    };
    if (const int code = encode_first(&p->first_k, a.k, batch_k, a.dim_qk))
      return failure(code, "cuTensorMapEncodeTiled of k");
    if (const int code = encode_first(&p->first_v, a.v, batch_v, a.dim_v))
      return failure(code, "cuTensorMapEncodeTiled of v");
  }
  if constexpr (C.bias())
    if (const int code = encode_bias(&p->bias, &p->bias_rows, a, C.type))
      return failure(code, "cuTensorMapEncodeTiled of bias");
  return {};
}

// The bounds from which the order of tiles is made. In pages lengths are known to the device only;
// most are near the longest in a prefill.
template <KernelConfig C>
SequenceBounds typical_bounds(const KernelParams& p, const AttentionArguments& a) {
  if (!C.paged()) return p.bounds;
  return make_bounds(make_sequence_pair(a.mask, 0, dense_sequence(a.queries.max_seqlen),
                                        dense_sequence(a.keys.max_seqlen), 0, 0, 0));
}

template <KernelConfig C>
Outcome make_params(KernelParams* p, const AttentionArguments& a, const Selection& selected) {
  using T = Traits<C>;
  const auto row_blocks = static_cast<int>((a.queries.max_seqlen + T::kBlockM - 1) / T::kBlockM);
  p->args = a;
  if (needs_tile_counter(a, selected)) p->counter = static_cast<TileCounter*>(a.workspace);
  if (a.is_uniform) p->bounds = make_bounds(a.uniform_pair);
  p->order = make_tile_order(row_blocks, static_cast<int>(a.batch),
                             head_shape(a, typical_bounds<C>(*p, a), T::kConsumers, C.masked()));
  p->divisors = p->order.divisors<FastDivisor>();
  p->heads_per_kv = FastDivisor(a.heads_q / a.heads_kv);
  p->unit = score_unit(a);
  p->scale_log2 = p->unit.factor * kLog2E;
  if (C.softcap()) p->softcap = make_softcap_polynomial(a.scale, a.softcap);
  if (C.paged()) {
    p->page_size = FastDivisor(a.keys.page_size);
    p->pages_k = static_cast<int>(std::min<int64_t>(a.page_table_k.pages, INT32_MAX));
    p->pages_v = static_cast<int>(std::min<int64_t>(a.page_table_v.pages, INT32_MAX));
    while (2 << p->box_rows_log2 <= box_rows(a.keys.page_size, T::kBlockN)) ++p->box_rows_log2;
  }
  return encode_maps<C>(p, a);
}

template <Variant kVariant, int kTile, Type kType>
Outcome launch(const AttentionArguments& a, const Selection& selected, cudaStream_t stream) {
  constexpr KernelConfig C = kKernelConfig<kVariant, kTile, kType>;
  constexpr int kThreads = Traits<C>::kThreads;
  constexpr int kSharedBytes = sizeof(typename Traits<C>::SharedStorage);
  static OncePerDevice allowed;
  const void* const kernel = reinterpret_cast<const void*>(forward_kernel<kVariant, kTile, kType>);
  int sms = 0;
  if (const Outcome ready = prepare_launch(kernel, kSharedBytes, allowed, &sms); ready.code)
    return ready;
  KernelParams p = {};
  if (const Outcome made = make_params<C>(&p, a, selected); made.code) return made;
  // An upper bound where only the device knows the lengths.
  const int tiles = p.order.count();
  const int ctas = std::clamp(tiles, 1, static_cast<int>(limited_ctas(a, sms)));
  if (tiles <= ctas) p.counter = nullptr;  // each CTA has one tile
  if (p.counter) p.launch_number = next_launch_number();
  cudaLaunchConfig_t config = {};
  config.gridDim = ctas, config.blockDim = kThreads;
  config.dynamicSmemBytes = kSharedBytes, config.stream = stream;
  void* arguments[] = {&p};
  const cudaError_t code = launch_dependent(kernel, config, arguments, true);
  return code == cudaSuccess ? Outcome{} : failure(code, "the launch");
}

template <Variant kVariant, int kTile, Type kType>
constexpr Launcher launcher_or_null() {
  if constexpr (is_instantiated(kTile, kVariant))
    return launch<kVariant, kTile, kType>;
  else
    return nullptr;
}
template <Variant kVariant, Type kType, int... kTile>
constexpr std::array<Launcher, kNumTiles> make_launchers(std::integer_sequence<int, kTile...>) {
  return {launcher_or_null<kVariant, kTile, kType>()...};
}

}  // namespace

template <Variant kVariant>
Launcher find_launcher(int tile, Type type) {
  constexpr auto kAllTiles = std::make_integer_sequence<int, kNumTiles>();
  static constexpr auto kBf16 = make_launchers<kVariant, Type::kBf16>(kAllTiles);
  static constexpr auto kFp16 = make_launchers<kVariant, Type::kFp16>(kAllTiles);
  return (type == Type::kFp16 ? kFp16 : kBf16)[static_cast<size_t>(tile)];
}

}  // namespace tea::hopper
