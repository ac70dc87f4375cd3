// Tests of tile.cuh and softmax.cuh: storing an accumulator, using one as an operand, and the
// online softmax against a plain one in double.
#include <cmath>

#include "hopper/device/softmax.cuh"
#include "hopper/device/wgmma.cuh"
#include "hopper/primitives.h"
#include "math/formats.h"

namespace tea::primitives {
namespace {

using namespace tea::hopper;

// Values that bf16 holds exactly and that no row or column repeats soon.
__host__ __device__ constexpr float mark(int row, int column) {
  return static_cast<float>((row * 37 + column * 5) % 251);
}

template <int kN, int kWidth>
__global__ void store_marks(uint8_t* out, int size) {
  extern __shared__ __align__(1024) uint8_t shared[];
  for (int i = threadIdx.x; i < size; i += blockDim.x) shared[i] = 0;
  __syncthreads();
  float d[kN / 2];
  const int first = threadIdx.x / 128 * 64;
#pragma unroll
  for (int i = 0; i < kN / 2; ++i) d[i] = mark(first + accumulator_row(i), accumulator_column(i));
  store_tile<Type::kBf16>({shared, static_cast<Swizzle>(kWidth), 128}, first, d);
  __syncthreads();
  for (int i = threadIdx.x; i < size; i += blockDim.x) out[i] = shared[i];
}

template <int kN, int kWidth>
void check_store() {
  const int slabs = (kN * 2 + kWidth - 1) / kWidth, size = slabs * 128 * kWidth;
  const Buffer<uint8_t> out(size);
  launch(store_marks<kN, kWidth>, 1, 256, size, out.data, size);
  finish("store_tile");
  std::vector<uint8_t> want(size, 0);
  for (int r = 0; r < 128; ++r)
    for (int c = 0; c < kN; ++c) {
      const uint32_t at =
          2 * c / kWidth * 128 * kWidth + swizzled(static_cast<Swizzle>(kWidth), r, 2 * c % kWidth);
      const uint16_t code = bf16_encode(mark(r, c));
      want[at] = code & 0xFF;
      want[at + 1] = code >> 8;
    }
  expect(out.read() == want,
         "store_tile n=" + std::to_string(kN) + " swizzle=" + std::to_string(kWidth));
}

// out[64][64] = p[64][128] v[128][64], p as an accumulator that becomes the operand in registers.
template <Type kType>
__global__ void chain(const float* p, const uint8_t* v, float* out) {
  extern __shared__ __align__(1024) uint8_t shared[];
  constexpr bool kNarrow = bytes(kType) == 1;
  constexpr int kColumns = kNarrow ? 32 : 16;  // of one instruction
  for (int i = threadIdx.x; i < 128 * 64 * bytes(kType); i += 128) shared[i] = v[i];
  fence_proxy_async();
  __syncthreads();
  float s[64], o[32];
#pragma unroll
  for (int i = 0; i < 64; ++i) s[i] = p[accumulator_row(i) * 128 + accumulator_column(i)];
  uint32_t a[128 / kColumns][4];
#pragma unroll
  for (int c = 0; c < 128 / kColumns; ++c) {
    if constexpr (kNarrow)
      accumulator_as_fp8_operand<kType>(a[c], s, c);
    else
      accumulator_as_operand<kType>(a[c], s, c);
  }
  wgmma_fence_operand(o);
  wgmma_fence();
#pragma unroll
  for (int c = 0; c < 128 / kColumns; ++c) {
    const uint64_t right = make_descriptor(shared, Swizzle::k128);
    if constexpr (kNarrow)
      wgmma<WgmmaShape{64, kType, kType}>(o, a[c], advance_descriptor(right, c * 32), c > 0);
    else
      wgmma<WgmmaShape{64, kType, kType, Major::kK, Major::kMN}>(
          o, a[c], advance_descriptor(right, c * 16 * 128), c > 0);
  }
  wgmma_commit();
  wgmma_wait<0>();
  wgmma_fence_operand(o);
#pragma unroll
  for (int i = 0; i < 32; ++i) out[accumulator_row(i) * 64 + accumulator_column(i)] = o[i];
}

template <Type kType>
void check_chain(const char* name) {
  std::vector<float> p(64 * 128), v(128 * 64), want(64 * 64, 0);
  for (auto* x : {&p, &v})
    for (float& e : *x) e = static_cast<float>(random_int(-4, 4));
  for (int i = 0; i < 64 * 64; ++i)
    for (int k = 0; k < 128; ++k) want[i] += p[i / 64 * 128 + k] * v[k * 64 + i % 64];
  std::vector<uint8_t> image(128 * 64 * bytes(kType));
  for (int c = 0; c < 64; ++c)
    for (int k = 0; k < 128; ++k) {
      if (bytes(kType) == 1) {  // transposed, and its rows in the operand's order
        const int key = k / 32 * 32 + fp8_column(k % 32);
        image[swizzled(Swizzle::k128, c, k)] = fp8_encode(v[key * 64 + c], kE4M3);
      } else {
        const uint16_t code = bf16_encode(v[k * 64 + c]);
        image[swizzled(Swizzle::k128, k, 2 * c)] = code & 0xFF;
        image[swizzled(Swizzle::k128, k, 2 * c) + 1] = code >> 8;
      }
    }
  const Buffer<float> device_p(p), out(want.size());
  const Buffer<uint8_t> device_v(image);
  launch(chain<kType>, 1, 128, static_cast<int>(image.size()), device_p.data, device_v.data,
         out.data);
  finish(name);
  expect(out.read() == want, name);
}

constexpr int kColumns = 80, kTiles = 5, kKeys = kColumns * kTiles;

// Per row: the softmax-weighted sum of `values`, and the LSE; scores[64][kKeys].
__global__ void softmax_rows(const float* scores, const float* values, float scale, float sink,
                             float2* out) {
  OnlineSoftmax softmax;
  softmax.start();
  float o[2] = {0, 0};
  for (int tile = 0; tile < kTiles; ++tile) {
    float s[kColumns / 2], rescale[2];
    for (int i = 0; i < kColumns / 2; ++i)
      s[i] = scores[accumulator_row(i) * kKeys + tile * kColumns + accumulator_column(i)];
    float highest[2];
    thread_row_max(s, highest);
    softmax.update(s, highest, scale * kLog2E, rescale);
    o[0] *= rescale[0];
    o[1] *= rescale[1];
    for (int i = 0; i < kColumns / 2; ++i)
      o[row_slot(i)] += s[i] * values[tile * kColumns + accumulator_column(i)];
  }
  const OnlineSoftmax::Result end = softmax.finalize({scale, 0}, sink);
  for (int r = 0; r < 2; ++r) {
    const float sum = quad_sum(o[r]);
    if (lane() % 4 == 0) out[accumulator_row(2 * r)] = {sum * end.row[r].factor, end.row[r].lse};
  }
}

struct Row {
  double sum, lse;
};

Row plain_softmax(const float* scores, const std::vector<float>& values, double scale,
                  double sink) {
  double row_max = sink, total = 0, sum = 0;
  for (int k = 0; k < kKeys; ++k) row_max = std::fmax(row_max, scores[k] * scale);
  if (row_max == -INFINITY) return {0, -INFINITY};
  if (sink > -INFINITY) total = std::exp(sink - row_max);
  for (int k = 0; k < kKeys; ++k) {
    const double p = std::exp(scores[k] * scale - row_max);
    total += p;
    sum += p * values[k];
  }
  return {sum / total, row_max + std::log(total)};
}

// Row 0 attends to nothing, rows 1.. to fewer and fewer, the first tiles empty; some scores huge.
void check_softmax(float sink, const char* name) {
  std::vector<float> scores(64 * kKeys), values(kKeys);
  for (float& v : values) v = random_normal();
  for (int i = 0; i < 64 * kKeys; ++i) {
    const int row = i / kKeys, key = i % kKeys;
    scores[i] = random_normal() * (row % 8 == 5 ? 1000.0f : 8.0f);
    if (row == 0 || (row < 32 && key < 12 * row)) scores[i] = -INFINITY;
  }
  const float scale = 0.25f;
  const Buffer<float> device_scores(scores), device_values(values);
  const Buffer<float2> out(64);
  softmax_rows<<<1, 128>>>(device_scores.data, device_values.data, scale, sink, out.data);
  finish(name);
  const auto got = out.read();
  double worst = 0, worst_lse = 0;
  for (int row = 0; row < 64; ++row) {
    const Row want = plain_softmax(&scores[row * kKeys], values, scale, sink);
    const double off = std::fabs(got[row].x - want.sum);
    // The scaled score is rounded once, so the power's error grows with its magnitude.
    const double bound = row % 8 == 5 ? 1e-3 : 1e-5;
    worst = std::isnan(off) ? INFINITY : std::fmax(worst, off / bound);
    const double lse_off =
        want.lse == got[row].y ? 0 : std::fabs(got[row].y - want.lse) / (1 + std::fabs(want.lse));
    worst_lse = std::isnan(lse_off) ? INFINITY : std::fmax(worst_lse, lse_off / 1e-6);
  }
  expect(worst <= 1, std::string(name) + " values, error over bound " + std::to_string(worst));
  expect(worst_lse <= 1, std::string(name) + " LSE, error over bound " + std::to_string(worst_lse));
}

// For each of [begin, end): the columns of a row of 80 that the quad finds between them.
__global__ void find_columns(const int2* ranges, int* found) {
  const int2 range = ranges[blockIdx.x];
  const uint32_t bits = column_mask<80>(range.x, range.y);
  for (int i = 0; i < 40; ++i)
    if (row_slot(i) == 0 && (bits >> index_in_row(i) & 1) && lane() < 4)
      atomicAdd(&found[blockIdx.x * 80 + accumulator_column(i)], 1);
}
void check_columns() {
  std::vector<int2> ranges;
  std::vector<int> want;
  for (int begin = -3; begin < 84; begin += 3)
    for (int end = -3; end < 90; ++end) {
      ranges.push_back({begin, end});
      for (int c = 0; c < 80; ++c) want.push_back(c >= begin && c < end);
    }
  const Buffer<int2> device_ranges(ranges);
  const Buffer<int> found(std::vector<int>(want.size(), 0));
  find_columns<<<static_cast<int>(ranges.size()), 32>>>(device_ranges.data, found.data);
  finish("column_mask");
  expect(found.read() == want, "column_mask finds each column once, for every range");
}

}  // namespace

void test_tiles() {
  check_columns();
  check_store<64, 128>();
  check_store<128, 128>();
  check_store<80, 128>();
  check_store<96, 64>();
  check_store<80, 32>();
  check_chain<Type::kBf16>("accumulator as a bf16 operand");
  check_chain<Type::kE4M3>("accumulator as an e4m3 operand");
  check_softmax(-INFINITY, "softmax");
  check_softmax(0.0f, "softmax with one more score of zero");
  check_softmax(400.0f, "softmax with a sink far above most scores");
}

}  // namespace tea::primitives
