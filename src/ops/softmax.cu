// Scaled softmax. A group of threads shares a row and holds it in registers, so that it is read and
// written once; rows longer than that are read again, from the caches.
#include "ops/launch.cuh"
#include "ops/softmax.h"
#include "ops/vectors.cuh"

namespace tea {
namespace {

constexpr int kMostThreads = 512, kWarp = 32;
constexpr int kHeld = 4;  // vectors of a row that a thread holds

// The kernels: of rows on multiples of 16 bytes or not, with a mask or not, held or read again.
template <int32_t type, bool is_wide, bool is_masked, bool is_held>
struct Config {
  static constexpr int32_t dtype = type;
  static constexpr bool wide = is_wide, masked = is_masked, held = is_held;
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
template <class C>
struct Row {
  using Rows = RowVectors<C::dtype, kHeld, C::wide>;
  using Vector = typename Rows::Vector;
  using Bits = typename Rows::Bits;
  using Real = typename Vector::Format::Real;
  static constexpr int kSize = Vector::kSize;

  int64_t first;        // the element of its first column in this thread's part
  int64_t column;       // that column
  int64_t cols, n;      // n: columns that it sees; 0 columns where there is no row
  const uint8_t* mask;  // of the row, or NULL
  int64_t distance;     // columns from one vector of a thread to its next

  __device__ Row(const tea_scaled_softmax& a, int64_t line, int lanes) {
    const bool exists = line < a.batch * a.heads * a.rows;
    const int64_t matrix = quotient(line, a.rows), row = line - matrix * a.rows;
    column = threadIdx.x % lanes * kSize;
    first = line * a.cols + column;
    cols = exists ? a.cols : 0, n = exists ? visible_count(a, row) : 0;
    mask = C::masked && exists ? mask_row(a, matrix, row) : nullptr;
    distance = int64_t{lanes} * kSize;
  }
  // The columns that the row sees, from `begin` on; anything, but no NaN of theirs, behind them.
  __device__ void load(Rows& x, const void* from, int64_t begin) const {
    x.load(static_cast<const Bits*>(from) + first + begin, distance, n - column - begin);
  }
  __device__ void load_scores(Vector (&x)[kHeld], const void* from, int64_t begin,
                              Real scale) const {
    Rows bits;
    load(bits, from, begin);
    uint8_t masked[C::masked ? kHeld : 1][kSize];
    if constexpr (C::masked) load_mask(masked, begin);
    bits.decode(x);
#pragma unroll
    for (int k = 0; k < kHeld; ++k)
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        x[k].x[i] *= scale;
        if constexpr (C::masked)
          if (masked[k][i] == 1) x[k].x[i] = Real{kMaskedScore};
      }
    replace_behind(x, begin, n, Real{-INFINITY});
  }
  // All columns; those that the row does not see become zero.
  __device__ void store(Vector (&x)[kHeld], void* to, int64_t begin, bool zero) const {
    replace_behind(x, begin, zero ? 0 : n, Real{0});
    Rows::store(x, static_cast<Bits*>(to) + first + begin, distance, cols - column - begin);
  }
  __device__ void replace_behind(Vector (&x)[kHeld], int64_t begin, int64_t end, Real value) const {
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      const int64_t left = end - begin - column - k * distance;
      if (left >= kSize) continue;
      const int kept = left < 0 ? 0 : static_cast<int>(left);
#pragma unroll
      for (int i = 0; i < kSize; ++i) x[k].x[i] = i < kept ? x[k].x[i] : value;
    }
  }

 private:
  __device__ void load_mask(uint8_t (&masked)[kHeld][kSize], int64_t begin) const {
    using Unit = std::conditional_t<kSize == 8, uint64_t,
                                    std::conditional_t<kSize == 4, uint32_t, uint16_t>>;
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      const int64_t c = begin + column + k * distance;
      Unit all = 0;
      if constexpr (C::wide) {
        if (mask && c < n) all = *reinterpret_cast<const Unit*>(mask + c);
      } else {
#pragma unroll
        for (int i = 0; i < kSize; ++i)
          if (mask && c + i < n) all |= Unit{mask[c + i]} << (8 * i);
      }
#pragma unroll
      for (int i = 0; i < kSize; ++i) masked[k][i] = static_cast<uint8_t>(all >> (8 * i));
    }
  }
};

// Calls body with every element of the vectors.
template <class Vector, class Body>
__device__ __forceinline__ void each(Vector (&x)[kHeld], const Body& body) {
#pragma unroll
  for (int k = 0; k < kHeld; ++k)
#pragma unroll
    for (int i = 0; i < Vector::kSize; ++i) body(x[k].x[i]);
}

template <class C>
__global__ void __launch_bounds__(kMostThreads)
    softmax_forward(const tea_scaled_softmax a, const double rounded_scale, const int lanes) {
  using Vector = typename Row<C>::Vector;
  using Real = typename Row<C>::Real;
  const int here = blockDim.x / lanes;
  const auto scale = static_cast<Real>(rounded_scale);
  const int64_t rows = a.batch * a.heads * a.rows, all = int64_t{gridDim.x} * here;
  for (int64_t line = int64_t{blockIdx.x} * here; line < rows; line += all) {
    const Row<C> row(a, line + threadIdx.x / lanes, lanes);
    const int64_t stride = row.distance * kHeld, end = C::held ? 1 : a.cols;
    Vector x[kHeld];
    Real largest = -INFINITY, sum = 0;
    for (int64_t begin = 0; begin < end; begin += stride) {
      row.load_scores(x, a.input, begin, scale);
      each(x, [&](Real& score) { largest = Largest()(largest, score); });
    }
    largest = reduced(largest, lanes, Largest());
    for (int64_t begin = 0; begin < end; begin += stride) {
      if constexpr (!C::held) row.load_scores(x, a.input, begin, scale);
      each(x, [&](Real& score) { sum += score = exponential(score - largest); });
    }
    const Real factor = 1 / reduced(sum, lanes, Plus());
    const bool zero = row.mask && largest == Real{kMaskedScore};
    for (int64_t begin = 0; begin < end; begin += stride) {
      if constexpr (!C::held) {
        row.load_scores(x, a.input, begin, scale);
        each(x, [&](Real& score) { score = exponential(score - largest); });
      }
      each(x, [&](Real& y) { y *= factor; });
      row.store(x, a.output, begin, zero);
    }
  }
}

template <class C>
__global__ void __launch_bounds__(kMostThreads)
    softmax_backward(const tea_scaled_softmax a, const int lanes) {
  using Rows = typename Row<C>::Rows;
  using Vector = typename Row<C>::Vector;
  using Real = typename Row<C>::Real;
  const int here = blockDim.x / lanes;
  const int64_t rows = a.batch * a.heads * a.rows, all = int64_t{gridDim.x} * here;
  for (int64_t line = int64_t{blockIdx.x} * here; line < rows; line += all) {
    const Row<C> row(a, line + threadIdx.x / lanes, lanes);
    const int64_t stride = row.distance * kHeld, end = C::held ? 1 : a.cols;
    Vector y[kHeld], dy[kHeld];
    const auto load = [&](int64_t begin) {
      Rows y_bits, dy_bits;
      row.load(y_bits, a.input, begin);
      row.load(dy_bits, a.dout, begin);
      y_bits.decode(y);
      dy_bits.decode(dy);
      row.replace_behind(y, begin, row.n, Real{0});
      row.replace_behind(dy, begin, row.n, Real{0});
    };
    Real sum = 0;
    for (int64_t begin = 0; begin < end; begin += stride) {
      load(begin);
#pragma unroll
      for (int k = 0; k < kHeld; ++k)
#pragma unroll
        for (int i = 0; i < Vector::kSize; ++i) sum += y[k].x[i] * dy[k].x[i];
    }
    sum = reduced(sum, lanes, Plus());
    for (int64_t begin = 0; begin < end; begin += stride) {
      if constexpr (!C::held) load(begin);
#pragma unroll
      for (int k = 0; k < kHeld; ++k)
#pragma unroll
        for (int i = 0; i < Vector::kSize; ++i)
          dy[k].x[i] = Real{a.scale} * y[k].x[i] * (dy[k].x[i] - sum);
      row.store(dy, a.output, begin, false);
    }
  }
}

// How a problem is run: by as many threads for a row as hold it, one block's at most.
struct Way {
  int lanes;
  bool wide, masked, held;
};

template <int32_t dtype>
Way way_of(const tea_scaled_softmax& a) {
  constexpr int kBytes = sizeof(typename Element<dtype>::Bits), kSize = VectorOf<dtype>::kSize;
  const auto bits = [](const void* address) { return reinterpret_cast<uintptr_t>(address); };
  int lanes = 1;
  while (lanes < kMostThreads && int64_t{lanes} * kHeld * kSize < a.cols) lanes *= 2;
  const bool wide = access_bytes(bits(a.input) | bits(a.dout) | bits(a.output) |
                                 static_cast<uint64_t>(a.cols * kBytes)) == 16 &&
                    bits(a.mask) % kSize == 0;
  const bool held = a.cols <= int64_t{lanes} * kHeld * kSize;
  // Without a mask a kernel that can read one does as well; the long rows have no other.
  return {lanes, wide, a.mask || !held, held};
}

// Calls body with the Config.
template <int32_t dtype, class Body>
void with_config(const Way& way, const Body& body) {
  with_bool(way.wide, [&](auto wide) {
    if (!way.held)
      body(Config<dtype, wide(), true, false>());
    else if (way.masked)
      body(Config<dtype, wide(), true, true>());
    else
      body(Config<dtype, wide(), false, true>());
  });
}

Launch launch_of(const char* name, const tea_scaled_softmax& a, int lanes) {
  const int block = std::max(kBlock, lanes);
  return {name, dim3(blocks_for(a.batch * a.heads * a.rows * lanes, block)), dim3(block)};
}

}  // namespace

void softmax_forward_on_gpu(const tea_scaled_softmax& args, double scale, const Place& place) {
  with_real(args.dtype, [&](auto dtype) {
    const Way way = way_of<dtype()>(args);
    with_config<dtype()>(way, [&](auto config) {
      launch(launch_of("softmax_forward", args, way.lanes), softmax_forward<decltype(config)>,
             place, args, scale, way.lanes);
    });
  });
}

void softmax_backward_on_gpu(const tea_scaled_softmax& args, const Place& place) {
  with_real(args.dtype, [&](auto dtype) {
    const Way way = way_of<dtype()>(args);
    with_bool(way.wide, [&](auto wide) {
      with_bool(way.held, [&](auto held) {
        using C = Config<dtype(), wide(), false, held()>;
        launch(launch_of("softmax_backward", args, way.lanes), softmax_backward<C>, place, args,
               way.lanes);
      });
    });
  });
}

}  // namespace tea
