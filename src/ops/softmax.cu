// Scaled softmax. A group of threads shares a row and holds it in registers, so that it is read and
// written once; rows longer than that are read again, from the caches. The next row of a group
// comes into shared memory while one is worked on: the work alone leaves memory idle for as long.
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
  // Rows are fetched ahead. (The mask of two elements is less than one copy moves.)
  static constexpr bool ahead = wide && held && !(masked && dtype == TEA_FP64);
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

// Copies to shared memory that go on beside the thread, of 4, 8 or 16 bytes; and the wait for all.
template <int kBytes>
__device__ __forceinline__ void copy_async(uint32_t shared, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared), "l"(from), "n"(kBytes)
               : "memory");
}
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}
// What they brought.
__device__ __forceinline__ uint4 load_shared_16(uint32_t from) {
  uint4 x;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(from)
               : "memory");
  return x;
}
template <int kBytes>
__device__ __forceinline__ uint2 load_shared_bytes(uint32_t from) {
  uint2 x = {};
  if constexpr (kBytes == 8)
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(from) : "memory");
  else
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x.x) : "r"(from) : "memory");
  return x;
}

// A bit for each byte of `bytes`, its highest: clear where the byte is 1.
__device__ __forceinline__ uint32_t other_than_one(uint32_t bytes) {
  const uint32_t difference = bytes ^ 0x01010101u;
  return ((difference & 0x7F7F7F7Fu) + 0x7F7F7F7Fu) | difference;
}

// A thread's own part of the next row, in shared memory. It alone writes and reads it, and a vector
// of its neighbour lies beside each of its own.
template <class C>
struct Ahead {
  static constexpr int kMaskBytes = VectorOf<C::dtype>::kSize;
  static constexpr int bytes(int inputs) {  // of a thread
    return C::ahead ? kHeld * (inputs * 16 + (C::masked ? kMaskBytes : 0)) : 0;
  }

  uint32_t own, marks;  // in shared memory: this thread's first vector and its mask
  __device__ explicit Ahead(const void* shared) {
    const auto begin = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
    own = begin + threadIdx.x * 16;
    marks = begin + kHeld * blockDim.x * 16 + threadIdx.x * kMaskBytes;  // where there is one input
  }
  __device__ uint32_t vector(int input, int k) const {
    return own + (input * kHeld + k) * blockDim.x * 16;
  }
  __device__ uint32_t mask(int k) const { return marks + k * blockDim.x * kMaskBytes; }
};

// The row that this thread works on, from the first column of its part on. These kernels are bound
// by instructions before they are bound by memory: columns of held rows are counted in 32 bits, and
// work on vectors of which the row sees nothing is left out.
template <class C>
struct Row {
  using Stored = RowVector<C::dtype, C::wide>;
  using Vector = typename Stored::Numbers;
  using Bits = typename Stored::Bits;
  using Real = typename Vector::Format::Real;
  using Column = std::conditional_t<C::held, int32_t, int64_t>;
  static constexpr int kSize = Vector::kSize;

  int64_t first;        // element
  Column seen, cols;    // columns that the row sees, and has; none where there is no row
  const uint8_t* mask;  // or NULL
  Column distance;      // columns from one vector of a thread to its next

  __device__ Row(const tea_scaled_softmax& a, int64_t line, const Team& team) {
    const int column = team.lane() * kSize;
    first = line * a.cols + column;
    seen = cols = -column, mask = nullptr, distance = team.lanes() * kSize;
    if (line >= a.batch * a.heads * a.rows) return;
    cols += static_cast<Column>(a.cols), seen = cols;
    if (a.kind == TEA_SCORE_MASK_NONE) return;
    const int64_t matrix = quotient(line, a.rows), row = line - matrix * a.rows;
    seen = static_cast<Column>(visible_count(a, row)) - column;
    if constexpr (C::masked) mask = mask_row(a, matrix, row);
    if (mask) mask += column;
  }

  // Calls body with the first column of every part of the row that its threads hold at a time.
  template <class Body>
  __device__ __forceinline__ static void each_part(Column all, Column distance, const Body& body) {
    if constexpr (C::held)
      body(0);
    else
      for (Column begin = 0; begin < all; begin += distance * kHeld) body(begin);
  }
  // Calls body with the number of every vector of which the row sees something, and how much.
  template <class Body>
  __device__ __forceinline__ void each_vector(Column begin, const Body& body) const {
#pragma unroll
    for (int k = 0; k < kHeld; ++k)
      if (const Column left = seen - begin - k * distance; left > 0) body(k, left);
  }
  // The same for the place of every element in them.
  template <class Body>
  __device__ __forceinline__ void each(Column begin, const Body& body) const {
    each_vector(begin, [&](int k, Column) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) body(k, i);
    });
  }
  // What the row does not see of a vector becomes `value`.
  __device__ static void end_at(Vector& x, Column left, Real value) {
    if (left >= kSize) return;
#pragma unroll
    for (int i = 0; i < kSize; ++i) x.x[i] = i < left ? x.x[i] : value;
  }

  // The bytes of the mask that belong to a vector, `left` of which the row sees.
  __device__ uint2 marks(const Ahead<C>& ahead, Column begin, int k, Column left) const {
    if constexpr (C::ahead) {
      return load_shared_bytes<kSize>(ahead.mask(k));
    } else {
      alignas(8) uint8_t bytes[8] = {};
      load_bits(reinterpret_cast<uint8_t(&)[kSize]>(bytes), mask + begin + k * distance, left,
                C::wide ? kSize : 1);
      return reinterpret_cast<const uint2&>(bytes);
    }
  }
  __device__ static void set_masked(Vector& x, const uint2& marks) {
    const uint32_t other[] = {other_than_one(marks.x), other_than_one(marks.y)};
#pragma unroll
    for (int i = 0; i < kSize; ++i)
      if (!(other[i / 4] & 0x80u << i % 4 * 8)) x.x[i] = Real{kMaskedScore};
  }

  // Has the row's vectors of an input copied, and its mask with those of the first.
  __device__ void fetch(const Ahead<C>& to, int input, const void* from) const {
    const Bits* const begin = static_cast<const Bits*>(from) + first;
    each_vector(0, [&](int k, Column) {
      copy_async<16>(to.vector(input, k), begin + k * distance);
      if constexpr (C::masked)
        if (mask) copy_async<kSize>(to.mask(k), mask + k * distance);
    });
  }
  // The vectors from `begin` on: those that were fetched, or from memory.
  __device__ void load(Stored (&x)[kHeld], const Ahead<C>& ahead, int input, const void* from,
                       Column begin) const {
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      const Column at = begin + k * distance;
      if constexpr (C::ahead) {
        x[k] = {};
        if (at < seen) reinterpret_cast<uint4&>(x[k]) = load_shared_16(ahead.vector(input, k));
      } else {
        x[k].load(static_cast<const Bits*>(from) + first + at, seen - at);
      }
    }
  }
  __device__ void load_scores(Vector (&x)[kHeld], const Ahead<C>& ahead, const void* from,
                              Column begin, Real scale) const {
    Stored stored[kHeld];
    load(stored, ahead, 0, from, begin);
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      x[k] = stored[k].numbers();
#pragma unroll
      for (int i = 0; i < kSize; ++i) x[k].x[i] *= scale;
    }
    each_vector(begin, [&](int k, Column left) {
      if constexpr (C::masked)
        if (mask) set_masked(x[k], marks(ahead, begin, k, left));
      end_at(x[k], left, Real{-INFINITY});
    });
  }
  // All columns from `begin` on: what numbers(k) gives, but zeros that the row does not see.
  template <class Numbers>
  __device__ void store(void* to, Column begin, const Numbers& numbers) const {
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      const Column at = begin + k * distance;
      if (at >= cols) break;
      Stored y = {};
      if (at < seen) {
        Vector x = numbers(k);
        end_at(x, seen - at, Real{0});
        y.set(x);
      }
      y.store(static_cast<Bits*>(to) + first + at, cols - at);
    }
  }
};

// Additions to so many sums need not wait for each other.
constexpr int kSums = 4;
template <class Real, class Combine>
__device__ Real combined(const Real (&sums)[kSums], const Team& team, const Combine& combine) {
  const Real low = combine(sums[0], sums[1]), high = combine(sums[2], sums[3]);
  return reduced(combine(low, high), team, combine);
}

template <class C>
__global__ void __launch_bounds__(kMostThreads, 2)
    softmax_forward(const tea_scaled_softmax a, const typename Row<C>::Real scale,
                    const Team team) {
  using R = Row<C>;
  using Real = typename R::Real;
  using Column = typename R::Column;
  extern __shared__ uint4 shared[];
  const Ahead<C> ahead(shared);
  const int64_t rows = a.batch * a.heads * a.rows;
  // Whole blocks stay together: `line` is that of the block's first team.
  const int64_t own = threadIdx.x >> team.shift;
  R next(a, team.index(), team);
  if constexpr (C::ahead) next.fetch(ahead, 0, a.input);
  for (int64_t line = team.index() - own; line < rows; line += team.count()) {
    const R row = next;
    const auto each_part = [&](const auto& body) {
      R::each_part(static_cast<Column>(a.cols), row.distance, body);
    };
    typename R::Vector x[kHeld];
    Real most[kSums] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY}, sums[kSums] = {};
    if constexpr (C::ahead) wait_for_copies();
    each_part([&](Column begin) {
      row.load_scores(x, ahead, a.input, begin, scale);
      row.each(begin,
               [&](int k, int i) { most[i % kSums] = Largest()(most[i % kSums], x[k].x[i]); });
    });
    next = R(a, line + team.count() + own, team);
    if constexpr (C::ahead) next.fetch(ahead, 0, a.input);
    const Real largest = combined(most, team, Largest());
    each_part([&](Column begin) {
      if constexpr (!C::held) row.load_scores(x, ahead, a.input, begin, scale);
      row.each(begin, [&](int k, int i) {
        sums[i % kSums] += x[k].x[i] = exponential(x[k].x[i] - largest);
      });
    });
    const Real sum = combined(sums, team, Plus());
    const Real factor = row.mask && largest == Real{kMaskedScore} ? 0 : 1 / sum;
    each_part([&](Column begin) {
      if constexpr (!C::held) {
        row.load_scores(x, ahead, a.input, begin, scale);
        row.each(begin, [&](int k, int i) { x[k].x[i] = exponential(x[k].x[i] - largest); });
      }
      row.store(a.output, begin, [&](int k) {
#pragma unroll
        for (int i = 0; i < R::kSize; ++i) x[k].x[i] *= factor;
        return x[k];
      });
    });
  }
}

// What is held stays in the bits of memory, which are half as many registers as numbers.
template <class C>
__global__ void __launch_bounds__(kMostThreads, 2)
    softmax_backward(const tea_scaled_softmax a, const Team team) {
  using R = Row<C>;
  using Vector = typename R::Vector;
  using Real = typename R::Real;
  using Column = typename R::Column;
  extern __shared__ uint4 shared[];
  const Ahead<C> ahead(shared);
  const int64_t rows = a.batch * a.heads * a.rows;
  // Whole blocks stay together: `line` is that of the block's first team.
  const int64_t own = threadIdx.x >> team.shift;
  const auto fetch = [&](const R& row) {
    if constexpr (C::ahead) row.fetch(ahead, 0, a.input), row.fetch(ahead, 1, a.dout);
  };
  R next(a, team.index(), team);
  fetch(next);
  for (int64_t line = team.index() - own; line < rows; line += team.count()) {
    const R row = next;
    const auto each_part = [&](const auto& body) {
      R::each_part(static_cast<Column>(a.cols), row.distance, body);
    };
    typename R::Stored y[kHeld], dy[kHeld];
    const auto load = [&](Column begin) {
      row.load(y, ahead, 0, a.input, begin);
      row.load(dy, ahead, 1, a.dout, begin);
    };
    const auto numbers = [](const typename R::Stored& stored, Column left) {
      Vector x = stored.numbers();
      R::end_at(x, left, Real{0});
      return x;
    };
    Real sums[kSums] = {};
    if constexpr (C::ahead) wait_for_copies();
    each_part([&](Column begin) {
      load(begin);
      row.each_vector(begin, [&](int k, Column left) {
        const Vector p = numbers(y[k], left), dp = numbers(dy[k], left);
#pragma unroll
        for (int i = 0; i < R::kSize; ++i) sums[i % kSums] += p.x[i] * dp.x[i];
      });
    });
    next = R(a, line + team.count() + own, team);
    fetch(next);
    const Real sum = combined(sums, team, Plus());
    each_part([&](Column begin) {
      if constexpr (!C::held) load(begin);
      row.store(a.output, begin, [&](int k) {
        const Vector p = y[k].numbers();
        Vector dp = dy[k].numbers();
#pragma unroll
        for (int i = 0; i < R::kSize; ++i) dp.x[i] = Real{a.scale} * p.x[i] * (dp.x[i] - sum);
        return dp;
      });
    });
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

// A kernel that fetches rows ahead gets as many blocks as run at once, and each several rows.
template <class C>
Launch launch_of(const char* name, const tea_scaled_softmax& a, const Team& team, int inputs,
                 const Place& place) {
  const int block = std::max(kBlock, team.lanes());
  const int64_t threads = a.batch * a.heads * a.rows * team.lanes();
  unsigned blocks = blocks_for(threads, block);
  if (C::ahead) blocks = std::min(blocks, blocks_at_once(place, 2 * kMostThreads / block));
  return {name, dim3(blocks), dim3(block), block * Ahead<C>::bytes(inputs)};
}

}  // namespace

void softmax_forward_on_gpu(const tea_scaled_softmax& args, double scale, const Place& place) {
  with_real(args.dtype, [&](auto dtype) {
    const Way way = way_of<dtype()>(args);
    with_config<dtype()>(way, [&](auto config) {
      using C = decltype(config);
      launch(launch_of<C>("softmax_forward", args, way.team, 1, place), softmax_forward<C>, place,
             args, static_cast<typename Row<C>::Real>(scale), way.team);
    });
  });
}

void softmax_backward_on_gpu(const tea_scaled_softmax& args, const Place& place) {
  with_real(args.dtype, [&](auto dtype) {
    const Way way = way_of<dtype()>(args);
    with_bool(way.wide, [&](auto wide) {
      with_bool(way.held, [&](auto held) {
        using C = Config<dtype(), wide(), false, held()>;
        launch(launch_of<C>("softmax_backward", args, way.team, 2, place), softmax_backward<C>,
               place, args, way.team);
      });
    });
  });
}

}  // namespace tea
