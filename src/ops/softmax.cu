// Scaled softmax. A group of threads shares a row and holds it in registers, so that it is read and
// written once; rows longer than that are read again, from the caches.
#include "ops/launch.cuh"
#include "ops/softmax.h"
#include "ops/vectors.cuh"

namespace tea {
namespace {

constexpr int kMostThreads = 512, kWarp = 32;
constexpr int kHeld = 4;  // vectors of a row that a thread holds

struct Shape {
  int lanes;                // threads of a row, a power of two
  int access, mask_access;  // bytes of one access
};

// NaN wins, or a masked row could hide it.
struct Largest {
  __device__ float operator()(float a, float b) const {
    asm("max.NaN.f32 %0, %0, %1;" : "+f"(a) : "f"(b));
    return a;
  }
  __device__ double operator()(double a, double b) const { return b <= a || a != a ? a : b; }
};
struct Plus {
  template <class Real>
  __device__ Real operator()(Real a, Real b) const {
    return a + b;
  }
};

// exp of a difference that is at most 0: its error is that of the product, relative to which what
// vanishes below 2^-126 is nothing.
__device__ __forceinline__ float exponential(float x) {
  constexpr float kLog2E = 1.44269504f;
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * kLog2E));
  return y;
}
__device__ __forceinline__ double exponential(double x) { return exp(x); }

// Over the threads of a row. All threads of the block come here together.
template <class Real, class Combine>
__device__ Real reduced(Real value, int lanes, const Combine& combine) {
  __shared__ Real of_warp[kMostThreads / kWarp];
  for (int offset = (lanes < kWarp ? lanes : kWarp) / 2; offset; offset /= 2)
    value = combine(value, __shfl_xor_sync(~0u, value, offset));
  if (lanes <= kWarp) return value;
  const int warp = threadIdx.x / kWarp, first = threadIdx.x / lanes * (lanes / kWarp);
  if (threadIdx.x % kWarp == 0) of_warp[warp] = value;
  __syncthreads();
  value = of_warp[first];
  for (int i = 1; i < lanes / kWarp; ++i) value = combine(value, of_warp[first + i]);
  __syncthreads();  // before of_warp is written again
  return value;
}

// The row that this thread works on and its part in it.
template <int32_t dtype>
struct Row {
  using Vector = VectorOf<dtype>;
  using Real = typename Vector::Format::Real;
  static constexpr int kSize = Vector::kSize;

  int64_t first;        // its first element
  int64_t cols, n;      // n: columns that it sees; 0 columns where there is no row
  const uint8_t* mask;  // of the row, or NULL
  int64_t stride;       // columns that its threads hold together
  Shape shape;

  __device__ Row(const tea_scaled_softmax& a, int64_t line, const Shape& s) : shape(s) {
    const bool exists = line < a.batch * a.heads * a.rows;
    const int64_t matrix = quotient(line, a.rows), row = line - matrix * a.rows;
    first = line * a.cols;
    cols = exists ? a.cols : 0, n = exists ? visible_count(a, row) : 0;
    mask = exists ? mask_row(a, matrix, row) : nullptr;
    stride = int64_t{s.lanes} * kSize * kHeld;
  }
  __device__ bool held() const { return cols <= stride; }
  // The column of this thread's vector k in the stride that begins at `begin`.
  __device__ int64_t column(int64_t begin, int k) const {
    return begin + (int64_t{k} * shape.lanes + threadIdx.x % shape.lanes) * kSize;
  }
  // The columns that the row sees; zeros behind them.
  __device__ void load(VectorsOf<dtype, kHeld>& x, const void* from, int64_t begin) const {
    const int64_t c = column(begin, 0);
    x.load(static_cast<const typename Vector::Bits*>(from) + first + c, stride / kHeld, n - c,
           shape.access);
  }
  __device__ void load_scores(Vector (&x)[kHeld], const void* from, int64_t begin,
                              Real scale) const {
    VectorsOf<dtype, kHeld> bits;
    alignas(16) uint8_t masked[kHeld][kSize];
    load(bits, from, begin);
#pragma unroll
    for (int k = 0; k < kHeld; ++k)
      if (const int64_t c = column(begin, k); mask)
        load_bits(masked[k], mask + c, n - c, shape.mask_access);
    bits.decode(x);
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) x[k].x[i] *= scale;
      if (mask) {
#pragma unroll
        for (int i = 0; i < kSize; ++i)
          if (masked[k][i] == 1) x[k].x[i] = Real{kMaskedScore};
      }
      replace_behind(x[k], n - column(begin, k), Real{-INFINITY});
    }
  }
  // What lies behind the first `left` elements.
  __device__ static void replace_behind(Vector& x, int64_t left, Real value) {
    if (left >= kSize) return;
    const int kept = left < 0 ? 0 : static_cast<int>(left);
#pragma unroll
    for (int i = 0; i < kSize; ++i) x.x[i] = i < kept ? x.x[i] : value;
  }
  // All columns; those that the row does not see become zero.
  __device__ void store(Vector (&x)[kHeld], void* to, int64_t begin, bool zero) const {
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      const int64_t c = column(begin, k);
      replace_behind(x[k], zero ? 0 : n - c, Real{0});
      x[k].store(static_cast<typename Vector::Bits*>(to) + first + c, cols - c, shape.access);
    }
  }
};

template <int32_t dtype>
__global__ void __launch_bounds__(kMostThreads)
    softmax_forward(const tea_scaled_softmax a, const double rounded_scale, const Shape shape) {
  using Vector = VectorOf<dtype>;
  using Real = typename Vector::Format::Real;
  const int here = blockDim.x / shape.lanes;
  const auto scale = static_cast<Real>(rounded_scale);
  const int64_t rows = a.batch * a.heads * a.rows, all = int64_t{gridDim.x} * here;
  for (int64_t line = int64_t{blockIdx.x} * here; line < rows; line += all) {
    const Row<dtype> row(a, line + threadIdx.x / shape.lanes, shape);
    Vector x[kHeld];
    Real largest = -INFINITY, sum = 0;
    for (int64_t begin = 0; begin < a.cols; begin += row.stride) {
      row.load_scores(x, a.input, begin, scale);
#pragma unroll
      for (int k = 0; k < kHeld; ++k)
#pragma unroll
        for (int i = 0; i < Vector::kSize; ++i) largest = Largest()(largest, x[k].x[i]);
    }
    largest = reduced(largest, shape.lanes, Largest());
    for (int64_t begin = 0; begin < a.cols; begin += row.stride) {
      if (a.cols > row.stride) row.load_scores(x, a.input, begin, scale);
#pragma unroll
      for (int k = 0; k < kHeld; ++k)
#pragma unroll
        for (int i = 0; i < Vector::kSize; ++i) sum += x[k].x[i] = exponential(x[k].x[i] - largest);
    }
    const Real factor = 1 / reduced(sum, shape.lanes, Plus());
    const bool zero = row.mask && largest == Real{kMaskedScore};
    for (int64_t begin = 0; begin < row.cols; begin += row.stride) {
      if (!row.held()) {
        row.load_scores(x, a.input, begin, scale);
#pragma unroll
        for (int k = 0; k < kHeld; ++k)
#pragma unroll
          for (int i = 0; i < Vector::kSize; ++i) x[k].x[i] = exponential(x[k].x[i] - largest);
      }
#pragma unroll
      for (int k = 0; k < kHeld; ++k)
#pragma unroll
        for (int i = 0; i < Vector::kSize; ++i) x[k].x[i] *= factor;
      row.store(x, a.output, begin, zero);
    }
  }
}

template <int32_t dtype>
__global__ void __launch_bounds__(kMostThreads)
    softmax_backward(const tea_scaled_softmax a, const Shape shape) {
  using Vector = VectorOf<dtype>;
  using Real = typename Vector::Format::Real;
  const int here = blockDim.x / shape.lanes;
  const int64_t rows = a.batch * a.heads * a.rows, all = int64_t{gridDim.x} * here;
  for (int64_t line = int64_t{blockIdx.x} * here; line < rows; line += all) {
    const Row<dtype> row(a, line + threadIdx.x / shape.lanes, shape);
    Vector y[kHeld], dy[kHeld];
    const auto load_both = [&](int64_t begin) {
      VectorsOf<dtype, kHeld> y_bits, dy_bits;
      row.load(y_bits, a.input, begin);
      row.load(dy_bits, a.dout, begin);
      y_bits.decode(y);
      dy_bits.decode(dy);
    };
    Real sum = 0;
    for (int64_t begin = 0; begin < a.cols; begin += row.stride) {
      load_both(begin);
#pragma unroll
      for (int k = 0; k < kHeld; ++k)
#pragma unroll
        for (int i = 0; i < Vector::kSize; ++i) sum += y[k].x[i] * dy[k].x[i];
    }
    sum = reduced(sum, shape.lanes, Plus());
    for (int64_t begin = 0; begin < row.cols; begin += row.stride) {
      if (!row.held()) load_both(begin);
#pragma unroll
      for (int k = 0; k < kHeld; ++k)
#pragma unroll
        for (int i = 0; i < Vector::kSize; ++i)
          dy[k].x[i] = Real{a.scale} * y[k].x[i] * (dy[k].x[i] - sum);
      row.store(dy, a.output, begin, false);
    }
  }
}

// As many threads for a row as hold it, one block's at most.
template <int32_t dtype>
Shape shape_of(const tea_scaled_softmax& a) {
  constexpr int kBytes = sizeof(typename Element<dtype>::Bits);
  const auto bits = [](const void* address) { return reinterpret_cast<uintptr_t>(address); };
  Shape s{1, 0, 0};
  while (s.lanes < kMostThreads && int64_t{s.lanes} * kHeld * VectorOf<dtype>::kSize < a.cols)
    s.lanes *= 2;
  s.access = access_bytes(bits(a.input) | bits(a.dout) | bits(a.output) |
                          static_cast<uint64_t>(a.cols * kBytes));
  s.mask_access = access_bytes(bits(a.mask) | static_cast<uint64_t>(a.cols));
  return s;
}

Launch launch_of(const char* name, const tea_scaled_softmax& a, const Shape& s) {
  const int block = std::max(kBlock, s.lanes);
  return {name, dim3(blocks_for(a.batch * a.heads * a.rows * s.lanes, block)), dim3(block)};
}

}  // namespace

void softmax_forward_on_gpu(const tea_scaled_softmax& args, double scale, const Place& place) {
  with_real(args.dtype, [&](auto dtype) {
    const Shape shape = shape_of<dtype()>(args);
    launch(launch_of("softmax_forward", args, shape), softmax_forward<dtype()>, place, args, scale,
           shape);
  });
}

void softmax_backward_on_gpu(const tea_scaled_softmax& args, const Place& place) {
  with_real(args.dtype, [&](auto dtype) {
    const Shape shape = shape_of<dtype()>(args);
    launch(launch_of("softmax_backward", args, shape), softmax_backward<dtype()>, place, args,
           shape);
  });
}

}  // namespace tea
