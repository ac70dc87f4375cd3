// Casts to and from fp8, and the largest magnitude: one pass over the elements each.
#include "gpu/amax.cuh"
#include "ops/fp8_cast.h"
#include "ops/launch.cuh"
#include "ops/vectors.cuh"

namespace tea {
namespace {

constexpr int kElements = 16;  // per thread and step: one 16-byte access of fp8

__device__ void raise_by_block(float* amax, float value) {
  __shared__ float of_warp[kBlock / 32];
  for (int offset = 16; offset; offset /= 2)
    value = fmaxf(value, __shfl_xor_sync(~0u, value, offset));
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
  __syncthreads();
  if (threadIdx.x) return;
  for (const float other : of_warp) value = fmaxf(value, other);
  raise_amax(amax, value);
}

template <int32_t from, int32_t to>
__device__ float cast(const tea_fp8_cast& a, float factor, bool backwards, const int2& access) {
  const auto* const in = static_cast<const typename Element<from>::Bits*>(a.input);
  auto* const out = static_cast<typename Element<to>::Bits*>(a.output);
  float amax = 0;
  const int64_t block = backwards ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  const int64_t first = (block * blockDim.x + threadIdx.x) * kElements;
  for (int64_t i = first; i < a.count; i += thread_count() * kElements) {
    VectorOf<from, kElements> x;
    VectorOf<to, kElements> y;
    x.load(in + i, a.count - i, access.x);
#pragma unroll
    for (int k = 0; k < kElements; ++k) {
      const float value = static_cast<float>(x.x[k]);
      amax = fmaxf(amax, fabsf(value));
      y.x[k] = value * factor;
    }
    y.store(out + i, a.count - i, access.y);
  }
  return amax;
}

// `current`: *a.amax determines the scale; otherwise the scale is given, and amax is recorded.
template <int32_t from, int32_t to>
__global__ void __launch_bounds__(kBlock)
    quantize(const tea_fp8_cast a, int32_t current, const int2 access) {
  const float scale = current ? scale_for(*a.amax, a) : a.scale ? *a.scale : 1;
  // In reverse order, because the end of the input is in the cache after the amax kernel.
  const float amax = cast<from, to>(a, scale, current, access);
  if (!current && a.amax && a.count) raise_by_block(a.amax, amax);
  if (thread_index() != 0) return;
  if (a.scale_inv) *a.scale_inv = 1 / scale;
  if (current && a.scale) *a.scale = scale;
}

template <int32_t from, int32_t to>
__global__ void __launch_bounds__(kBlock) dequantize(const tea_fp8_cast a, const int2 access) {
  cast<from, to>(a, a.scale_inv ? *a.scale_inv : 1, false, access);
}

template <int32_t dtype>
__global__ void __launch_bounds__(kBlock)
    largest_magnitude(const ConstElements of, float* result, int access) {
  const auto* const in = static_cast<const typename Element<dtype>::Bits*>(of.data);
  float amax = 0;
  for (int64_t i = thread_index() * kElements; i < of.count; i += thread_count() * kElements) {
    VectorOf<dtype, kElements> x;
    x.load(in + i, of.count - i, access);
#pragma unroll
    for (int k = 0; k < kElements; ++k) amax = fmaxf(amax, fabsf(static_cast<float>(x.x[k])));
  }
  raise_by_block(result, amax);
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
int2 access_of(const tea_fp8_cast& a) { return {access_of(a.input), access_of(a.output)}; }

// Fewer CTAs if all of them update one word atomically.
dim3 grid_for(int64_t count, bool raising) {
  constexpr unsigned kRaising = 1 << 14;
  const unsigned blocks = blocks_for((count + kElements - 1) / kElements);
  return dim3(raising ? std::min(blocks, kRaising) : blocks);
}

}  // namespace

void quantize_on_gpu(const tea_fp8_cast& args, bool current, const Place& place) {
  with_real(args.input_dtype, [&](auto from) {
    with_fp8(args.output_dtype, [&](auto to) {
      launch({"quantize", grid_for(args.count, !current && args.amax)}, quantize<from(), to()>,
             place, args, int32_t{current}, access_of(args));
    });
  });
}

void dequantize_on_gpu(const tea_fp8_cast& args, const Place& place) {
  if (!args.count) return;
  with_fp8(args.input_dtype, [&](auto from) {
    with_real(args.output_dtype, [&](auto to) {
      launch({"dequantize", grid_for(args.count, false)}, dequantize<from(), to()>, place, args,
             access_of(args));
    });
  });
}

void update_amax_on_gpu(const ConstElements& of, float* amax, const Place& place) {
  if (!of.count) return;
  const auto run = [&](auto dtype) {
    launch({"largest_magnitude", grid_for(of.count, true)}, largest_magnitude<dtype()>, place, of,
           amax, access_of(of.data));
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
