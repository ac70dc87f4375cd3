// Casts to and from fp8, and the largest magnitude: one pass over the elements each.
#include <numeric>

#include "gpu/amax.cuh"
#include "ops/fp8_cast.h"
#include "ops/launch.cuh"
#include "ops/vectors.cuh"

namespace tea {
namespace {

constexpr int kElements = 16;  // per thread and step: one 16-byte access of fp8
// The threads of a CTA that reads all elements for itself, and the most elements that take it less
// time than a second kernel takes the host.
constexpr int kLargeBlock = 1024;
constexpr int64_t kMostRead = 1 << 16;

// The largest value of the CTA, in all of its threads.
template <int kThreads>
__device__ float largest_of_block(float value) {
  __shared__ float of_warp[kThreads / 32];
  for (int offset = 16; offset; offset /= 2)
    value = fmaxf(value, __shfl_xor_sync(~0u, value, offset));
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
  __syncthreads();
  for (const float other : of_warp) value = fmaxf(value, other);
  return value;
}

// Tensors, and the widths of their accesses. blockIdx.y is the index of a block's tensor.
struct Casts {
  tea_fp8_joint_cast a;
  Maxima maxima;
  int2 access[TEA_FP8_TENSORS];
};

template <int32_t from, int32_t to>
__device__ float cast(const Casts& c, float factor, bool backwards) {
  const int64_t count = c.a.count[blockIdx.y];
  const int2 access = c.access[blockIdx.y];
  const auto* const in = static_cast<const typename Element<from>::Bits*>(c.a.input[blockIdx.y]);
  auto* const out = static_cast<typename Element<to>::Bits*>(c.a.output[blockIdx.y]);
  float amax = 0;
  const int64_t block = backwards ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  const int64_t first = (block * blockDim.x + threadIdx.x) * kElements;
  for (int64_t i = first; i < count; i += thread_count() * kElements) {
    VectorOf<from, kElements> x;
    VectorOf<to, kElements> y;
    x.load(in + i, count - i, access.x);
#pragma unroll
    for (int k = 0; k < kElements; ++k) {
      const float value = static_cast<float>(x.x[k]);
      amax = fmaxf(amax, fabsf(value));
      y.x[k] = value * factor;
    }
    y.store(out + i, count - i, access.y);
  }
  return amax;
}

// The largest magnitude of the elements from `first` on that are read in steps of `step`.
template <int32_t dtype>
__device__ float largest_magnitude(const void* data, int64_t count, int access, int64_t first,
                                   int64_t step) {
  const auto* const in = static_cast<const typename Element<dtype>::Bits*>(data);
  float amax = 0;
  for (int64_t i = first * kElements; i < count; i += step * kElements) {
    VectorOf<dtype, kElements> x;
    x.load(in + i, count - i, access);
#pragma unroll
    for (int k = 0; k < kElements; ++k) amax = fmaxf(amax, fabsf(static_cast<float>(x.x[k])));
  }
  return amax;
}

__device__ void write_inverses(const tea_fp8_joint_cast& a, float scale) {
  if (a.scale_inv) *a.scale_inv = 1 / scale;
  for (int i = 0; i < 2; ++i)
    if (a.copied[i]) a.copy[i][0] = *a.copied[i], a.copy[i][1] = 1 / *a.copied[i];
}

// Current scaling, if there are maxima: the largest one determines the scale. Otherwise the scale
// is given, and amax is recorded.
template <int32_t from, int32_t to>
__global__ void __launch_bounds__(kBlock) quantize(const Casts c) {
  const tea_fp8_joint_cast& a = c.a;
  const bool current = c.maxima.count > 0;
  float amax = 0, scale = 1;
  if (current) {
    for (int i = threadIdx.x; i < c.maxima.count; i += kBlock) amax = fmaxf(amax, c.maxima.data[i]);
    amax = largest_of_block<kBlock>(amax);
    scale = scale_for(amax, a);
  } else if (a.scale) {
    scale = *a.scale;
  }
  // In reverse order, because the end of the input is in the cache after the amax kernel.
  const float seen = cast<from, to>(c, scale, current);
  if (!current && a.amax && a.count[blockIdx.y]) {
    const float largest = largest_of_block<kBlock>(seen);
    if (threadIdx.x == 0) raise_amax(a.amax, largest);
  }
  if (thread_index() != 0 || blockIdx.y != 0) return;
  write_inverses(a, scale);
  if (current && a.scale) *a.scale = scale;
  if (current && a.amax && a.amax != c.maxima.data) *a.amax = amax;
}

// Current scaling of small tensors by one kernel: every CTA finds the largest magnitude of all
// elements, since no CTA can wait for the others.
template <int32_t from, int32_t to>
__global__ void __launch_bounds__(kLargeBlock) quantize_small(const __grid_constant__ Casts c) {
  const tea_fp8_joint_cast& a = c.a;
  float amax = 0;
  for (int t = 0; t < a.tensors; ++t)
    amax = fmaxf(amax, largest_magnitude<from>(a.input[t], a.count[t], c.access[t].x, threadIdx.x,
                                               kLargeBlock));
  amax = largest_of_block<kLargeBlock>(amax);
  const float scale = scale_for(amax, a);
  cast<from, to>(c, scale, false);
  if (thread_index() != 0 || blockIdx.y != 0) return;
  write_inverses(a, scale);
  if (a.scale) *a.scale = scale;
  if (a.amax) *a.amax = amax;
}

template <int32_t from, int32_t to>
__global__ void __launch_bounds__(kBlock) dequantize(const Casts c) {
  cast<from, to>(c, c.a.scale_inv ? *c.a.scale_inv : 1, false);
}

template <int32_t dtype>
__global__ void __launch_bounds__(kBlock)
    raise_to_largest(const ConstElements of, float* result, int access) {
  const float amax = largest_of_block<kBlock>(
      largest_magnitude<dtype>(of.data, of.count, access, thread_index(), thread_count()));
  if (threadIdx.x == 0) raise_amax(result, amax);
}

// One maximum for each block, which needs no memory that is 0 before.
template <int32_t dtype>
__global__ void __launch_bounds__(kBlock) find_maxima(const Casts c) {
  const int of = blockIdx.y;
  const float amax = largest_of_block<kBlock>(largest_magnitude<dtype>(
      c.a.input[of], c.a.count[of], c.access[of].x, thread_index(), thread_count()));
  if (threadIdx.x == 0) c.a.maxima[of * gridDim.x + blockIdx.x] = amax;
}

// A CTA for each scale. Rows are moved in chunks of one row a thread: a chunk reads the rows after
// its own before it writes them, so the next chunk still finds its rows unchanged.
__global__ void __launch_bounds__(kBlock) update_scales(const tea_fp8_scales a) {
  __shared__ float largest;
  float* const history = a.amax_history + blockIdx.x;
  const float latest = a.amax ? a.amax[blockIdx.x] : history[0];
  if (threadIdx.x == 0) largest = latest >= 0 ? latest : 0;
  float amax = 0;
  for (int64_t first = 0; first < a.length - 1; first += blockDim.x) {
    const int64_t row = first + threadIdx.x;
    const float next = row < a.length - 1 ? history[(row + 1) * a.count] : 0;
    amax = fmaxf(amax, next);
    __syncthreads();
    if (row < a.length - 1) history[row * a.count] = next;
  }
  __syncthreads();
  if (a.algorithm == TEA_AMAX_MAX) raise_amax(&largest, amax);
  __syncthreads();
  if (threadIdx.x) return;
  history[(a.length - 1) * a.count] = latest;
  history[0] = 0;
  a.scale[blockIdx.x] = next_scale(largest, a.scale[blockIdx.x], a);
}

int access_of(const void* data) { return access_bytes(reinterpret_cast<uintptr_t>(data)); }

Casts casts_of(const tea_fp8_joint_cast& a, const Maxima& maxima = {}) {
  Casts out{a, maxima, {}};
  for (int i = 0; i < a.tensors; ++i)
    out.access[i] = {access_of(a.input[i]), access_of(a.output[i])};
  return out;
}

unsigned blocks_of(int64_t count, int block = kBlock) {
  return blocks_for((count + kElements - 1) / kElements, block);
}

// Fewer CTAs if all of them update one word atomically.
constexpr unsigned kRaising = 1 << 14;

// A row of CTAs for each tensor, as many as the largest one needs, but at most `most` in all.
dim3 grid_for(const tea_fp8_joint_cast& a, unsigned most, int block = kBlock) {
  const auto tensors = static_cast<unsigned>(a.tensors);
  const int64_t largest = *std::max_element(a.count, a.count + a.tensors);
  return {std::min(blocks_of(largest, block), most / tensors), tensors, 1};
}

}  // namespace

void quantize_on_gpu(const tea_fp8_joint_cast& args, const Maxima& maxima, const Place& place) {
  const unsigned most = !maxima.count && args.amax ? kRaising : ~0u;
  with_real(args.input_dtype, [&](auto from) {
    with_fp8(args.output_dtype, [&](auto to) {
      launch({"quantize", grid_for(args, most)}, quantize<from(), to()>, place,
             casts_of(args, maxima));
    });
  });
}

bool quantize_small_on_gpu(const tea_fp8_joint_cast& args, const Place& place) {
  if (std::accumulate(args.count, args.count + args.tensors, int64_t{0}) > kMostRead) return false;
  with_real(args.input_dtype, [&](auto from) {
    with_fp8(args.output_dtype, [&](auto to) {
      launch({"quantize_small", grid_for(args, ~0u, kLargeBlock), dim3(kLargeBlock)},
             quantize_small<from(), to()>, place, casts_of(args));
    });
  });
  return true;
}

void dequantize_on_gpu(const tea_fp8_joint_cast& args, const Place& place) {
  if (std::all_of(args.count, args.count + args.tensors, [](int64_t n) { return n == 0; })) return;
  with_fp8(args.input_dtype, [&](auto from) {
    with_real(args.output_dtype, [&](auto to) {
      launch({"dequantize", grid_for(args, ~0u)}, dequantize<from(), to()>, place, casts_of(args));
    });
  });
}

Maxima find_maxima_on_gpu(const tea_fp8_joint_cast& args, const Place& place) {
  const dim3 grid = grid_for(args, TEA_FP8_MAXIMA);
  with_real(args.input_dtype, [&](auto from) {
    launch({"find_maxima", grid}, find_maxima<from()>, place, casts_of(args));
  });
  return {args.maxima, static_cast<int32_t>(grid.x * grid.y)};
}

void update_amax_on_gpu(const ConstElements& of, float* amax, const Place& place) {
  if (!of.count) return;
  const auto run = [&](auto dtype) {
    launch({"raise_to_largest", dim3(std::min(blocks_of(of.count), kRaising))},
           raise_to_largest<dtype()>, place, of, amax, access_of(of.data));
  };
  if (of.dtype == TEA_E4M3 || of.dtype == TEA_E5M2)
    with_fp8(of.dtype, run);
  else
    with_real(of.dtype, run);
}

void update_scales_on_gpu(const tea_fp8_scales& args, const Place& place) {
  launch({"update_scales", dim3(static_cast<unsigned>(args.count))}, update_scales, place, args);
}

}  // namespace tea
