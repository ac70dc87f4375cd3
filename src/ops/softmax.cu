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
__device__ Real reduced(Real value, const Team& team, const Combine& combine) {
  __shared__ Real of_warp[kMostThreads / kWarp];
  const int lanes = team.lanes(), warps = lanes / kWarp;
  for (int offset = (lanes < kWarp ? lanes : kWarp) / 2; offset; offset /= 2)
    value = combine(value, __shfl_xor_sync(~0u, value, offset));
  if (lanes <= kWarp) return value;
  const int thread = threadIdx.x, first = (thread >> team.shift) * warps;
  if (thread % kWarp == 0) of_warp[thread / kWarp] = value;
  __syncthreads();
  value = of_warp[first + (thread & (warps - 1))];
  for (int offset = warps / 2; offset; offset /= 2)
    value = combine(value, __shfl_xor_sync(~0u, value, offset));
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

  __device__ Row(const tea_scaled_softmax& a, int64_t line, const Team& team) {
    const bool exists = line < a.batch * a.heads * a.rows;
    const int64_t matrix = quotient(line, a.rows), row = line - matrix * a.rows;
    column = team.lane() * kSize;
    first = line * a.cols + column;
    cols = exists ? a.cols : 0, n = exists ? visible_count(a, row) : 0;
    mask = C::masked && exists ? mask_row(a, matrix, row) : nullptr;
    distance = int64_t{team.lanes()} * kSize;
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

// Calls body with the place of every element in the vectors of which the row sees something.
template <class C, class Body>
__device__ __forceinline__ void each(const Row<C>& row, int64_t begin, const Body& body) {
  const int64_t left = row.n - row.column - begin;
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    if (k * row.distance >= left) break;
#pragma unroll
    for (int i = 0; i < Row<C>::kSize; ++i) body(k, i);
  }
}

// Additions to so many sums need not wait for each other.
constexpr int kSums = 4;
template <class Real, class Combine>
__device__ Real combined(const Real (&sums)[kSums], const Team& team, const Combine& combine) {
  const Real low = combine(sums[0], sums[1]), high = combine(sums[2], sums[3]);
  return reduced(combine(low, high), team, combine);
}

template <class C>
__global__ void __launch_bounds__(kMostThreads, 2)
    softmax_forward(const tea_scaled_softmax a, const double rounded_scale, const Team team) {
  using Vector = typename Row<C>::Vector;
  using Real = typename Row<C>::Real;
  const auto scale = static_cast<Real>(rounded_scale);
  const int64_t rows = a.batch * a.heads * a.rows;
  // Whole blocks stay together: `line` is that of the block's first team.
  const int64_t own = threadIdx.x >> team.shift;
  for (int64_t line = team.index() - own; line < rows; line += team.count()) {
    const Row<C> row(a, line + own, team);
    const int64_t stride = row.distance * kHeld, end = C::held ? 1 : a.cols;
    Vector x[kHeld];
    Real most[kSums] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY}, sums[kSums] = {};
    for (int64_t begin = 0; begin < end; begin += stride) {
      row.load_scores(x, a.input, begin, scale);
      each(row, begin,
           [&](int k, int i) { most[i % kSums] = Largest()(most[i % kSums], x[k].x[i]); });
    }
    const Real largest = combined(most, team, Largest());
    for (int64_t begin = 0; begin < end; begin += stride) {
      if constexpr (!C::held) row.load_scores(x, a.input, begin, scale);
      each(row, begin,
           [&](int k, int i) { sums[i % kSums] += x[k].x[i] = exponential(x[k].x[i] - largest); });
    }
    const Real factor = 1 / combined(sums, team, Plus());
    const bool zero = row.mask && largest == Real{kMaskedScore};
    for (int64_t begin = 0; begin < end; begin += stride) {
      if constexpr (!C::held) {
        row.load_scores(x, a.input, begin, scale);
        each(row, begin, [&](int k, int i) { x[k].x[i] = exponential(x[k].x[i] - largest); });
      }
      each(row, begin, [&](int k, int i) { x[k].x[i] *= factor; });
      row.store(x, a.output, begin, zero);
    }
  }
}

template <class C>
__global__ void __launch_bounds__(kMostThreads)
    softmax_backward(const tea_scaled_softmax a, const Team team) {
  using Rows = typename Row<C>::Rows;
  using Vector = typename Row<C>::Vector;
  using Real = typename Row<C>::Real;
  const int64_t rows = a.batch * a.heads * a.rows;
  // Whole blocks stay together: `line` is that of the block's first team.
  const int64_t own = threadIdx.x >> team.shift;
  for (int64_t line = team.index() - own; line < rows; line += team.count()) {
    const Row<C> row(a, line + own, team);
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
    Real sums[kSums] = {};
    for (int64_t begin = 0; begin < end; begin += stride) {
      load(begin);
      each(row, begin, [&](int k, int i) { sums[i % kSums] += y[k].x[i] * dy[k].x[i]; });
    }
    const Real sum = combined(sums, team, Plus());
    for (int64_t begin = 0; begin < end; begin += stride) {
      if constexpr (!C::held) load(begin);
      each(row, begin,
           [&](int k, int i) { dy[k].x[i] = Real{a.scale} * y[k].x[i] * (dy[k].x[i] - sum); });
      row.store(dy, a.output, begin, false);
    }
  }
}

// How a problem is run: by as many threads for a row as hold it, one block's at most.
struct Way {
  Team team;
  bool wide, masked, held;
};

template <int32_t dtype>
Way way_of(const tea_scaled_softmax& a) {
  constexpr int kBytes = sizeof(typename Element<dtype>::Bits), kSize = VectorOf<dtype>::kSize;
  const auto bits = [](const void* address) { return reinterpret_cast<uintptr_t>(address); };
  const Team team = Team::of(a.cols, kHeld * kSize, kMostThreads);
  const bool wide = access_bytes(bits(a.input) | bits(a.dout) | bits(a.output) |
                                 static_cast<uint64_t>(a.cols * kBytes)) == 16 &&
                    bits(a.mask) % kSize == 0;
  const bool held = a.cols <= int64_t{team.lanes()} * kHeld * kSize;
  // Without a mask a kernel that can read one does as well; the long rows have no other.
  return {team, wide, a.mask || !held, held};
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

Launch launch_of(const char* name, const tea_scaled_softmax& a, const Team& team) {
  const int block = std::max(kBlock, team.lanes());
  const int64_t threads = a.batch * a.heads * a.rows * team.lanes();
  return {name, dim3(blocks_for(threads, block)), dim3(block)};
}

}  // namespace

void softmax_forward_on_gpu(const tea_scaled_softmax& args, double scale, const Place& place) {
  with_real(args.dtype, [&](auto dtype) {
    const Way way = way_of<dtype()>(args);
    with_config<dtype()>(way, [&](auto config) {
      launch(launch_of("softmax_forward", args, way.team), softmax_forward<decltype(config)>, place,
             args, scale, way.team);
    });
  });
}

void softmax_backward_on_gpu(const tea_scaled_softmax& args, const Place& place) {
  with_real(args.dtype, [&](auto dtype) {
    const Way way = way_of<dtype()>(args);
    with_bool(way.wide, [&](auto wide) {
      with_bool(way.held, [&](auto held) {
        using C = Config<dtype(), wide(), false, held()>;
        launch(launch_of("softmax_backward", args, way.team), softmax_backward<C>, place, args,
               way.team);
      });
    });
  });
}

}  // namespace tea
