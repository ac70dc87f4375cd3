// The table of the forward kernels (forward_kernel.cuh), and the launch of one of them.
#pragma once
#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <utility>

#include "gpu/early.cuh"
#include "gpu/once.h"
#include "hopper/forward_kernel.cuh"
#include "hopper/tensor_map.h"

namespace tea::hopper {

constexpr Row kTable[] = {
    // dim  v  consumers cols q_stages turns early skips kv_stages staged
    {64, 64, 3, 128, 2, true, false, true, 2, true},
    {96, 96, 2, 128, 2, true, false, false, 2, true},
    {128, 128, 2, 128, 2, true, false, false, 2, true},
    {192, 128, 2, 128, 1, false, false, false, 2},
    {192, 192, 2, 112, 1, false, true, false, 2},
    {256, 256, 2, 80, 1, false, true, true, 2},
    // Where sequences are short, instead of the first row, and under a mask of the one before.
    {64, 64, 4, 64, 2, true, false, true, 4, true},
    {256, 256, 2, 64, 1, false, true, true, 2},
};
constexpr int kWide = 5, kShort = 6, kShortWide = 7;

// A row as kernels of a kind have it. A bias passes through shared memory: fewer keys leave room
// for it from 192 on. Under a mask, three consumers may be a block apart at 64, which takes a stage
// more, and four do better without turns. General kernels scale O late everywhere, which is up to
// 9 % faster from 192 on, and take turns at 256.
constexpr Row fitted(Row row, Kind kind) {
  if (kind == Kind::kMasked && row.dim == 64) {
    if (row.consumers == 3) row.kv_stages = 3, row.apart = true;
    if (row.consumers == 4) row.turns = false, row.halves = true;
  }
  if (kind >= Kind::kGeneral) row.rescale_early = false;
  if (kind == Kind::kGeneral && row.dim == 256) row.turns = true;
  if (kind == Kind::kBiased) {
    if (row.dim == 128) row.staged = false;
    if (row.dim >= 192) row.cols = row.dim == 256 ? 64 : 96;
  }
  return row;
}

// Calls the kernel of a row of the table. One source file per kind, so that they compile at once.
Outcome launch_full(int row, const Forward& f, cudaStream_t stream);
Outcome launch_masked(int row, const Forward& f, cudaStream_t stream);
bool has_capped(int row);
Outcome launch_capped(int row, const Forward& f, cudaStream_t stream);
bool has_dropped(int row);
Outcome launch_dropped(int row, const Forward& f, cudaStream_t stream);
Outcome launch_general(int row, const Forward& f, cudaStream_t stream);
Outcome launch_biased(int row, const Forward& f, cudaStream_t stream);

// A number that no launch had before, and that no memory holds by chance; never 0.
uint64_t launch_number();

inline bool bounded(const MaskRule& m) { return m.causal || m.window_left || m.window_right; }
// The driver's codes are those of the runtime.
inline Outcome failed(int code, const char* what) {
  return {code, what, cudaGetErrorString(static_cast<cudaError_t>(code))};
}
inline Outcome refused(const char* what) { return failed(cudaErrorInvalidValue, what); }

namespace {

// A table of rows for kernels of one kind, in both types or in bf16 only.
template <Kind kKind>
struct Table {
  static constexpr const auto& rows = kTable;
  static constexpr Kind kind = kKind;
  static constexpr int types = 2, count = kKind == Kind::kMasked ? kShortWide + 1
                                          : kKind == Kind::kFull ? kShort + 1
                                                                 : kShort;
};
template <class Rows>
constexpr Config config(int number) {
  const Row row = Rows::rows[number / Rows::types];
  return {fitted(row, Rows::kind), number % Rows::types ? Type::kFp16 : Type::kBf16, Rows::kind};
}

// Named by a number, not by a Config: GCC takes a Config whose row was read from a constant array
// for another than the equal one that nvcc writes where it registers the kernel, and what is
// launched is then unknown to CUDA (cudaErrorInvalidResourceHandle). registered.py looks for that.
template <class Rows, int kNumber>
__global__ void __launch_bounds__(Kernel<config<Rows>(kNumber)>::kThreads, 1)
    entry(const __grid_constant__ Parameters p) {
  Kernel<config<Rows>(kNumber)>::body(p);
}

// A tensor as the copy engine sees it: see the head of forward_kernel.cuh for y and z. The driver's
// code.
int map(TensorMap* to, const Strided& x, const Sequences& side, int dim, int heads, int batch,
        Type type, Swizzle s, int box_rows) {
  const int64_t rows = side.form == Form::kRagged ? side.tokens : side.rows;
  const int batches = side.form == Form::kRagged ? 1 : batch;
  const auto extent = [](int64_t n) { return static_cast<uint64_t>(std::max<int64_t>(n, 1)); };
  const auto bytes = [](int64_t stride) { return static_cast<uint64_t>(stride) * 2; };
  const MapShape shape = {
      type,
      s,
      5,
      {extent(dim), extent(box_rows), extent(heads), extent(rows + 1), extent(batches)},
      {0, bytes(x.row), bytes(x.head), bytes(x.row), bytes(x.batch)},
      {static_cast<uint32_t>(width(s) / 2), static_cast<uint32_t>(box_rows), 1, 1, 1}};
  return encode(to, static_cast<char*>(x.data) - box_rows * x.row * 2, shape);
}

// The bias as the copy engine sees it, a dimension for each index; one that it lacks has one
// element. rows: BiasTile's, none where the copy engine cannot address it.
int map_bias(TensorMap* to, int* rows, const Forward& f, Type type) {
  const General& g = f.general;
  const auto fits = [](int64_t stride) { return stride % 8 == 0 && stride < int64_t{1} << 39; };
  const bool aligned = reinterpret_cast<uintptr_t>(g.bias) % 16 == 0;
  *rows = 0;
  if (g.bias_is_fp32 || g.bias_col != 1 || !aligned || !fits(g.bias_row) || !fits(g.bias_head) ||
      !fits(g.bias_batch) || f.keys.rows == 0)
    return 0;
  *rows = g.bias_row ? 64 : 1;
  const auto extent = [](int64_t stride, int64_t n) {
    return static_cast<uint64_t>(stride ? std::max<int64_t>(n, 1) : 1);
  };
  const auto bytes = [](int64_t stride) { return static_cast<uint64_t>(stride ? stride : 8) * 2; };
  const MapShape shape = {type,
                          BiasTile::kSwizzle,
                          4,
                          {extent(1, f.keys.rows), extent(g.bias_row, f.queries.rows),
                           extent(g.bias_head, f.heads), extent(g.bias_batch, f.batch)},
                          {0, bytes(g.bias_row), bytes(g.bias_head), bytes(g.bias_batch)},
                          {uint32_t{BiasTile::kColumns}, static_cast<uint32_t>(*rows), 1, 1}};
  return encode(to, g.bias, shape);
}

// Whether tiles are claimed as blocks become free.
template <Config C>
bool tiles_differ(const Forward& f) {
  if (!needs_counter(f)) return false;
  if (C.masked() || f.queries.form != Form::kDense || f.keys.form != Form::kDense) return true;
  constexpr int kRows = Kernel<C>::kRows;
  return C.row.skips && (f.queries.rows - 1) % kRows < kRows - 64;
}

// Fails if the copy engine cannot address a tensor.
template <Config C>
Outcome fill(Parameters* p, const Forward& f) {
  using K = Kernel<C>;
  const int row_blocks = (f.queries.rows + K::kRows - 1) / K::kRows;
  p->f = f;
  if (!tiles_differ<C>(f)) p->f.counter = nullptr;
  p->order = order_of(f, row_blocks, f.heads, f.batch, K::kConsumers, C.masked());
  p->steps = p->order.steps<Divisor>();
  p->group = Divisor(f.heads / f.heads_kv);
  p->alike = alike(f);
  if (p->alike) p->common = common_of(f, 0);
  p->unit = unit_of(f);
  p->scale_log2 = p->unit.factor * kLog2E;
  if (C.capped()) p->cap = cap_of(f.scale, f.general.softcap);
  const struct {
    const char* what;
    TensorMap* to;
    const Strided& x;
    const Sequences& side;
    int dim, heads, box;
  } tensors[] = {
      {"cuTensorMapEncodeTiled of q", &p->q, f.q, f.queries, f.dim, f.heads, 64},
      {"cuTensorMapEncodeTiled of k", &p->k, f.k, f.keys, f.dim, f.heads_kv, K::kCols},
      {"cuTensorMapEncodeTiled of v", &p->v, f.v, f.keys, f.dim_v, f.heads_kv, K::kCols},
  };
  for (const auto& t : tensors) {
    const int code = map(t.to, t.x, t.side, t.dim, t.heads, f.batch, C.type, K::kSwizzle, t.box);
    if (code) return failed(code, t.what);
  }
  if constexpr (C.row.staged)
    if (const int code =
            map(&p->o, f.o, f.queries, f.dim_v, f.heads, f.batch, C.type, K::kSwizzle, 64))
      return failed(code, "cuTensorMapEncodeTiled of o");
  if constexpr (C.biased())
    if (const int code = map_bias(&p->bias, &p->bias_rows, f, C.type))
      return failed(code, "cuTensorMapEncodeTiled of bias");
  return {};
}

#define TEA_TRY(call, what) \
  if (const cudaError_t code = (call); code != cudaSuccess) return failed(code, what)

template <class Rows, int kNumber>
Outcome launch(const Forward& f, cudaStream_t stream) {
  constexpr Config C = config<Rows>(kNumber);
  constexpr int kThreads = Kernel<C>::kThreads, kShared = sizeof(typename Kernel<C>::Smem);
  constexpr auto kLimit = cudaFuncAttributeMaxDynamicSharedMemorySize;
  static OncePerDevice allowed;
  const auto kernel = entry<Rows, kNumber>;
  int device = 0, processors = 0;
  TEA_TRY(cudaGetDevice(&device), "cudaGetDevice");
  TEA_TRY(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device),
          "cudaDeviceGetAttribute");
  if (!allowed.done(device)) {
    TEA_TRY(cudaFuncSetAttribute(kernel, kLimit, kShared), "cudaFuncSetAttribute");
    allowed.mark(device);
  }
  Parameters p = {};
  if (const Outcome filled = fill<C>(&p, f); filled.code) return filled;
  // Of sequences whose lengths only the device knows, there may be fewer tiles than this.
  const int tiles = p.order.count(), blocks = std::clamp(tiles, 1, processors);
  if (tiles <= blocks) p.f.counter = nullptr;  // a tile each
  if (p.f.counter) p.launch = launch_number();
  cudaLaunchConfig_t config = {};
  config.gridDim = blocks, config.blockDim = kThreads;
  config.dynamicSmemBytes = kShared, config.stream = stream;
  void* arguments[] = {&p};
  TEA_TRY(launch_early(reinterpret_cast<const void*>(kernel), config, arguments, true),
          "the launch");
  return {};
}

using Launch = Outcome (*)(const Forward&, cudaStream_t);
template <class Rows, int... kNumber>
constexpr std::array<Launch, sizeof...(kNumber)> launchers(std::integer_sequence<int, kNumber...>) {
  return {launch<Rows, kNumber>...};
}
template <class Rows>
constexpr int kCount = int{Rows::count} * Rows::types;
template <class Rows>
constexpr auto kLaunch = launchers<Rows>(std::make_integer_sequence<int, kCount<Rows>>());

template <class Rows>
Outcome launch_row(int row, const Forward& f, cudaStream_t stream) {
  const int type = f.is_fp16 ? 1 : 0;
  if (type >= Rows::types) return refused("a type that these rows do not have");
  return kLaunch<Rows>[row * Rows::types + type](f, stream);
}

}  // namespace
}  // namespace tea::hopper
