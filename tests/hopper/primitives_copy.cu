// Tests of tma.cuh and tensor_map.h: boxes of every swizzle from strided tensors, with coordinates
// outside (how far: probe/probe_box.cu); stores, reductions, plain runs, multicast; what the
// encoder refuses.
#include <cstring>

#include "hopper/primitives.h"
#include "hopper/tensor_map.h"

namespace tea::primitives {
namespace {

using namespace tea::hopper;

struct Coordinates {
  int at[5];
};

template <int kRank>
TEA_DEVICE void load_any(void* to, const TensorMap& map, Barrier& b, const Coordinates& c) {
  int at[kRank];
  for (int i = 0; i < kRank; ++i) at[i] = c.at[i];
  tma_load(to, map, b, at);
}

template <int kRank>
__global__ void copy_box(const __grid_constant__ TensorMap map, Coordinates at, uint32_t size,
                         uint8_t* out) {
  extern __shared__ __align__(1024) uint8_t box[];
  __shared__ Barrier full;
  if (threadIdx.x == 0) {
    prefetch_tensor_map(map);
    init(full, 1);
    fence_barrier_init();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    arrive_and_expect_tx(full, size);
    load_any<kRank>(box, map, full, at);
  }
  wait(full, 0);
  for (uint32_t i = threadIdx.x; i < size; i += blockDim.x) out[i] = box[i];
}

struct Case {
  const char* name;
  MapShape shape;
  Coordinates at;
};

constexpr Swizzle k128 = Swizzle::k128, k64 = Swizzle::k64, k32 = Swizzle::k32,
                  kNone = Swizzle::kNone;
constexpr Type kBf = Type::kBf16, k8 = Type::kE4M3, kF = Type::kFp32;

// Extents, then strides in bytes (the first is not used), then the box, then where it starts.
const Case kCases[] = {
    {"bshd d128",
     {kBf, k128, 4, {128, 200, 3, 2}, {0, 768, 256, 153600}, {64, 64, 1, 1}},
     {0, 64, 1, 1}},
    {"bshd d128, second slab",
     {kBf, k128, 4, {128, 200, 3, 2}, {0, 768, 256, 153600}, {64, 128, 1, 1}},
     {64, 150, 2, 1}},
    {"bshd d72, zeros behind",
     {kBf, k128, 4, {72, 100, 3, 2}, {0, 432, 144, 43200}, {64, 64, 1, 1}},
     {64, 3, 1, 1}},
    {"bshd d80, zeros behind",
     {kBf, k128, 4, {80, 100, 3, 2}, {0, 480, 160, 48000}, {64, 176, 1, 1}},
     {64, 0, 2, 0}},
    {"bshd d96, zeros behind",
     {kBf, k128, 4, {96, 100, 3, 2}, {0, 576, 192, 57600}, {64, 80, 1, 1}},
     {64, 90, 2, 1}},
    {"bshd d40, first slab",
     {kBf, k128, 4, {40, 100, 3, 2}, {0, 240, 80, 24000}, {64, 64, 1, 1}},
     {0, 0, 0, 0}},
    {"d64 beyond every column",
     {kBf, k128, 4, {64, 100, 3, 2}, {0, 384, 128, 38400}, {64, 64, 1, 1}},
     {64, 0, 0, 0}},
    {"row stride an odd multiple of 16",
     {kBf, k128, 4, {64, 100, 3, 2}, {0, 432, 144, 43200}, {64, 64, 1, 1}},
     {0, 7, 1, 1}},
    {"bhsd: strides fall and rise",
     {kBf, k128, 4, {64, 100, 3, 2}, {0, 128, 12800, 38400}, {64, 112, 1, 1}},
     {0, 7, 2, 1}},
    {"sbhd", {kBf, k128, 4, {64, 50, 3, 2}, {0, 768, 128, 384}, {64, 64, 1, 1}}, {0, 9, 2, 1}},
    {"one key head for all: stride 0",
     {kBf, k128, 4, {64, 50, 5, 2}, {0, 128, 0, 6400}, {64, 64, 1, 1}},
     {0, 9, 4, 1}},
    {"packed bs3hd, keys",
     {kBf, k128, 4, {64, 50, 2, 2}, {0, 768, 128, 38400}, {64, 64, 1, 1}},
     {0, 5, 1, 0}},
    {"packed bsh3d, values",
     {kBf, k128, 4, {64, 50, 2, 2}, {0, 768, 384, 38400}, {64, 64, 1, 1}},
     {0, 5, 1, 1}},
    {"negative row",
     {kBf, k128, 4, {64, 100, 3, 2}, {0, 384, 128, 38400}, {64, 64, 1, 1}},
     {0, -5, 1, 1}},
    {"rows beyond the end",
     {kBf, k128, 4, {64, 100, 3, 2}, {0, 384, 128, 38400}, {64, 64, 1, 1}},
     {0, 100, 1, 1}},
    {"far coordinates",
     {kBf, k128, 4, {64, 100, 3, 2}, {0, 384, 128, 38400}, {64, 64, 1, 1}},
     {0, 2147483600, 1, 1}},
    {"head and batch outside",
     {kBf, k128, 4, {64, 100, 3, 2}, {0, 384, 128, 38400}, {64, 64, 1, 1}},
     {0, 0, 3, -1}},
    {"group of query heads as rows",
     {kBf, k128, 5, {64, 4, 30, 2, 2}, {0, 128, 1024, 512, 30720}, {64, 4, 16, 1, 1}},
     {0, 0, 8, 1, 1}},
    {"group of query heads, rows outside",
     {kBf, k128, 5, {64, 4, 30, 2, 2}, {0, 128, 1024, 512, 30720}, {64, 4, 32, 1, 1}},
     {0, 0, 16, 1, 1}},
    {"ragged: three dimensions",
     {kBf, k128, 3, {128, 300, 4}, {0, 1024, 256}, {64, 128, 1}},
     {64, 211, 3}},
    {"two dimensions, 64-byte swizzle", {kBf, k64, 2, {96, 70}, {0, 192}, {32, 64}}, {32, 3}},
    {"32-byte swizzle", {kBf, k32, 3, {48, 70, 2}, {0, 96, 6720}, {16, 64, 1}}, {32, 3, 1}},
    {"no swizzle", {kBf, kNone, 3, {48, 70, 2}, {0, 96, 6720}, {48, 64, 1}}, {0, 3, 1}},
    {"fp8 128-byte swizzle, d80",
     {k8, k128, 4, {80, 70, 3, 2}, {0, 240, 80, 16800}, {128, 64, 1, 1}},
     {0, 30, 1, 1}},
    {"fp8 64-byte swizzle",
     {k8, k64, 4, {64, 70, 3, 2}, {0, 192, 64, 13440}, {64, 64, 1, 1}},
     {0, 30, 1, 1}},
    {"fp32, d40",
     {kF, k128, 4, {40, 70, 3, 2}, {0, 480, 160, 33600}, {32, 64, 1, 1}},
     {32, 30, 1, 1}},
};

size_t bytes_spanned(const MapShape& s) {
  size_t last = s.extent[0] * bytes(s.type);
  for (int i = 1; i < s.rank; ++i) last += (s.extent[i] - 1) * s.stride[i];
  return last;
}

// The expected box in shared memory.
std::vector<uint8_t> expected_box(const Case& c, const std::vector<uint8_t>& tensor) {
  const MapShape& s = c.shape;
  const int element = bytes(s.type);
  uint32_t rows = 1;
  for (int i = 1; i < s.rank; ++i) rows *= s.box[i];
  std::vector<uint8_t> box(size_t{rows} * s.box[0] * element, 0);
  for (uint32_t row = 0; row < rows; ++row) {
    bool inside = true;
    size_t from = 0;
    uint32_t rest = row;
    for (int i = 1; i < s.rank; ++i) {
      const int64_t at = int64_t{c.at.at[i]} + rest % s.box[i];
      rest /= s.box[i];
      inside = inside && at >= 0 && at < static_cast<int64_t>(s.extent[i]);
      from += inside ? at * s.stride[i] : 0;
    }
    for (uint32_t x = 0; x < s.box[0]; ++x) {
      const int64_t at = int64_t{c.at.at[0]} + x;
      if (!inside || at < 0 || at >= static_cast<int64_t>(s.extent[0])) continue;
      const uint32_t offset = s.swizzle == Swizzle::kNone ? (row * s.box[0] + x) * element
                                                          : swizzled(s.swizzle, row, x * element);
      memcpy(&box[offset], &tensor[from + at * element], element);
    }
  }
  return box;
}

void load_every_case() {
  for (const Case& c : kCases) {
    const std::vector<uint8_t> tensor = random_bytes(bytes_spanned(c.shape));
    const Buffer<uint8_t> device(tensor);
    TensorMap map;
    const int code = encode(&map, device.data, c.shape);
    expect(code == 0, std::string("encode: ") + c.name + ", code " + std::to_string(code));
    if (code != 0) continue;
    const std::vector<uint8_t> want = expected_box(c, tensor);
    const uint32_t size = static_cast<uint32_t>(want.size());
    const Buffer<uint8_t> out(size);
    const auto kernel = c.shape.rank == 2   ? copy_box<2>
                        : c.shape.rank == 3 ? copy_box<3>
                        : c.shape.rank == 4 ? copy_box<4>
                                            : copy_box<5>;
    launch(kernel, 1, 128, size, map, c.at, size, out.data);
    finish(c.name);
    expect(out.read() == want, std::string("load: ") + c.name);
  }
}

void test_refusals() {
  const Buffer<uint8_t> device(1 << 16);
  const MapShape good = {kBf, k128, 3, {64, 64, 2}, {0, 128, 8192}, {64, 64, 1}};
  TensorMap map;
  expect(encode(&map, device.data, good) == 0, "a good map is encoded");
  const auto refused = [&](auto change, int offset, const char* what) {
    MapShape bad = good;
    change(bad);
    expect(encode(&map, device.data + offset, bad) != 0, std::string("refused: ") + what);
  };
  refused([](MapShape& s) { s.stride[1] = 136; }, 0, "a stride that is no multiple of 16");
  refused([](MapShape& s) { s.stride[1] = uint64_t{1} << 40; }, 0, "a stride of 2^40");
  refused([](MapShape& s) { s.extent[1] = 0; }, 0, "an empty dimension");
  refused([](MapShape& s) { s.box[1] = 257; }, 0, "a box of more than 256 rows");
  refused([](MapShape& s) { s.box[0] = 128; }, 0, "a box wider than its swizzle");
  refused([](MapShape&) {}, 8, "a base that is no multiple of 16");
}

__global__ void store_boxes(const __grid_constant__ TensorMap map,
                            const __grid_constant__ TensorMap sums, const uint8_t* from) {
  extern __shared__ __align__(1024) uint8_t box[];
  for (int i = threadIdx.x; i < 8192; i += blockDim.x) box[i] = from[i];
  fence_proxy_async();
  __syncthreads();
  if (threadIdx.x != 0) return;
  tma_store(map, box, {0, 40, 1, 1});
  tma_reduce_add(sums, box, {0, 40, 1, 1});
  tma_reduce_add(sums, box, {0, 40, 1, 1});
  bulk_commit();
  bulk_wait_read<0>();
  bulk_wait<0>();
}

// Rows 40..103 of 70, of one head of three and one batch entry of two: the rest stays as it was.
void test_stores() {
  const int rows = 70, dim = 32, heads = 3, batch = 2;
  std::vector<float> before(batch * rows * heads * dim), box(64 * dim);
  for (float& x : before) x = static_cast<float>(random_int(-9, 9));
  for (float& x : box) x = static_cast<float>(random_int(-9, 9));
  const MapShape shape = {kF, kNone, 4, {32, 70, 3, 2}, {0, 384, 128, 26880}, {32, 64, 1, 1}};
  const Buffer<float> plain(before), sums(before), from(box);
  TensorMap map, sum_map;
  expect(encode(&map, plain.data, shape) == 0, "encode for a store");
  expect(encode(&sum_map, sums.data, shape) == 0, "encode for a reduction");
  launch(store_boxes, 1, 128, 8192, map, sum_map, reinterpret_cast<const uint8_t*>(from.data));
  finish("stores");
  std::vector<float> stored = before, added = before;
  for (int r = 40; r < rows; ++r)
    for (int d = 0; d < dim; ++d) {
      const int at = ((rows + r) * heads + 1) * dim + d;
      stored[at] = box[(r - 40) * dim + d];
      added[at] += 2 * box[(r - 40) * dim + d];
    }
  expect(plain.read() == stored, "store: rows inside are written, the others not");
  expect(sums.read() == added, "tma_reduce_add: rows inside are added to, the others not");
}

__global__ void copy_runs(float* copy, float* sum, const float* from, int count) {
  extern __shared__ __align__(128) float run[];
  __shared__ Barrier full;
  if (threadIdx.x != 0) return;
  init(full, 1);
  fence_barrier_init();
  arrive_and_expect_tx(full, count * 4);
  bulk_load(run, from, count * 4, full);
  wait(full, 0);
  bulk_store(copy, run, count * 4);
  bulk_reduce_add(sum, run, count * 4);
  bulk_commit();
  bulk_wait<0>();
}

void test_runs() {
  std::vector<float> values(516);
  for (float& x : values) x = static_cast<float>(random_int(-99, 99));
  const Buffer<float> from(values), copy(values.size()), sum(values);
  launch(copy_runs, 1, 32, 4096, copy.data, sum.data, from.data, static_cast<int>(values.size()));
  finish("runs");
  expect(copy.read() == values, "bulk_load, bulk_store");
  for (float& x : values) x *= 2;
  expect(sum.read() == values, "bulk_reduce_add");
}

// Each block of a pair loads one half for both.
__global__ void __cluster_dims__(2)
    share_boxes(const __grid_constant__ TensorMap map, uint8_t* out) {
  extern __shared__ __align__(1024) uint8_t box[];
  __shared__ Barrier full;
  const int rank = cluster_cta_rank();
  if (threadIdx.x == 0) {
    init(full, 1);
    fence_barrier_init();
    arrive_and_expect_tx(full, 8192);
  }
  cluster_arrive();
  cluster_wait();
  if (threadIdx.x == 0) tma_load_multicast(box + 4096 * rank, map, full, {0, 32 * rank, 0, 0}, 3);
  wait(full, 0);
  for (int i = threadIdx.x; i < 8192; i += blockDim.x) out[8192 * rank + i] = box[i];
  cluster_arrive();
  cluster_wait();
}

void test_multicast() {
  const std::vector<uint8_t> tensor = random_bytes(64 * 128);
  const Buffer<uint8_t> device(tensor), out(16384);
  const Case half = {"", {kBf, k128, 4, {64, 64, 1, 1}, {0, 128, 8192, 8192}, {64, 32, 1, 1}}, {}};
  Case whole = half;
  whole.shape.box[1] = 64;
  TensorMap map;
  expect(encode(&map, device.data, half.shape) == 0, "encode for multicast");
  launch(share_boxes, 2, 128, 8192, map, out.data);
  finish("multicast");
  std::vector<uint8_t> want = expected_box(whole, tensor);
  want.insert(want.end(), want.begin(), want.begin() + 8192);
  expect(out.read() == want, "tma_load_multicast: both blocks hold both halves");
}

}  // namespace

void test_loads() { load_every_case(); }

void test_copies() {
  test_refusals();
  test_stores();
  test_runs();
  test_multicast();
}

}  // namespace tea::primitives
