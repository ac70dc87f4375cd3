// Scaled softmax. A team of threads shares a row and keeps it in registers, so that it is read and
// written once; longer rows are read again, from the caches. These kernels are bound by
// instructions rather than memory, so the common case, a row of exactly the team's capacity, has
// kernels without bounds checks.
#include "ops/launch.cuh"
#include "ops/softmax.cuh"
#include "ops/vectors.cuh"

namespace tea {
namespace {

constexpr int kMostThreads = 512, kLeastThreads = 128;
constexpr int kHeld = 4;  // vectors of a row in a thread's registers
// Waves of CTAs on an SM, each CTA with several rows: many for short rows, so that CTAs finish at
// different times; few for long rows, because each CTA begins with a memory latency.
constexpr int kRoundsOfShort = 16, kRoundsOfLong = 4;

// The kernel variants: rows aligned to 16 bytes or not, with a mask or not, in registers or read
// again; `whole`: every row has exactly the team's capacity; `counted`: separate code for each
// number of visible vectors.
template <int32_t type, bool is_wide, bool is_masked, bool is_held, bool is_whole, bool is_counted>
struct Config {
  static constexpr int32_t dtype = type;
  static constexpr bool wide = is_wide, masked = is_masked, held = is_held, whole = is_whole;
  static constexpr bool counted = is_counted;
  static_assert((wide && held) || !(whole || counted));
};

template <int n>
using Count = std::integral_constant<int, n>;

// Reduces over the threads of a row. All threads of the CTA call it, with alternating buffers, so
// that no thread overwrites a buffer before all have read it.
template <class Real, class Combine>
__device__ Real reduced(Real value, const Team& team, int side, const Combine& combine) {
  __shared__ Real of_warps[2][kMostThreads / kWarp];
  Real(&of_warp)[kMostThreads / kWarp] = of_warps[side];
  const int lanes = team.lanes(), warps = lanes / kWarp;
#pragma unroll
  for (int offset = kWarp / 2; offset; offset /= 2)
    if (offset < lanes) value = combine(value, __shfl_xor_sync(~0u, value, offset));
  if (lanes <= kWarp) return value;
  const int thread = threadIdx.x, first = (thread >> team.shift) * warps;
  if (thread % kWarp == 0) of_warp[thread / kWarp] = value;
  __syncthreads();
  value = of_warp[first + (thread & (warps - 1))];
  for (int offset = warps / 2; offset; offset /= 2)
    value = combine(value, __shfl_xor_sync(~0u, value, offset));
  return value;
}

// The highest bit of each byte of `bytes`: clear if the byte is 1.
__device__ __forceinline__ uint32_t other_than_one(uint32_t bytes) {
  const uint32_t difference = bytes ^ 0x01010101u;
  return ((difference & 0x7F7F7F7Fu) + 0x7F7F7F7Fu) | difference;
}

// The row of this thread, from the first column of its part. Columns of rows in registers are
// counted in 32 bits. backward: fully masked vectors are skipped even if they are not `counted`; in
// forward the branches cost more than they save, and would spill registers.
template <class C, bool backward>
struct Row {
  static constexpr bool kLeavesOut = !C::whole && (C::counted || backward);
  // A warp determines once the number of vectors that are fully visible for all its threads, and
  // that are visible for any thread.
  static constexpr bool kSorted = backward && C::wide && C::held && !C::whole;
  using Stored = RowVector<C::dtype, C::wide>;
  using Vector = typename Stored::Numbers;
  using Bits = typename Stored::Bits;
  using Real = typename Vector::Format::Real;
  using Column = std::conditional_t<C::held, int32_t, int64_t>;
  static constexpr int kSize = Vector::kSize;

  int64_t first;        // index of the first element
  Column seen, cols;    // visible columns and all columns; 0 without a row
  const uint8_t* mask;  // or NULL
  Column distance;      // columns between consecutive vectors of a thread
  // Vectors that are fully visible for all threads of the warp, and visible for any thread.
  int all, any;

  // in_matrix: the row's index in its matrix.
  __device__ Row(const tea_scaled_softmax& a, int64_t line, int64_t in_matrix, const Team& team) {
    const int column = team.lane() * kSize;
    first = line * a.cols + column;
    seen = cols = -column, mask = nullptr, distance = team.lanes() * kSize;
    if (line < a.batch * a.heads * a.rows) {
      cols += static_cast<Column>(a.cols), seen = cols;
      if constexpr (C::masked || !C::whole)
        if (a.kind != TEA_SCORE_MASK_NONE) look_up(a, line, in_matrix, column);
    }
    if constexpr (kSorted) {
      constexpr int kShift = std::countr_zero(unsigned{kSize});
      const int shift = team.shift + kShift;  // log2 of distance
      all = __reduce_min_sync(~0u, ((seen - kSize) >> shift) + 1);
      any = __reduce_max_sync(~0u, (seen + distance - 1) >> shift);
    }
  }
  __device__ void look_up(const tea_scaled_softmax& a, int64_t line, int64_t in_matrix,
                          int column) {
    seen = static_cast<Column>(visible_count(a, in_matrix)) - column;
    if constexpr (C::masked) mask = mask_row(a, quotient(line, a.rows), in_matrix);
    if (mask) mask += column;
  }

  // Calls body with the first column of every part of the row that fits the registers.
  template <class Body>
  __device__ __forceinline__ static void each_part(Column all, Column distance, const Body& body) {
    if constexpr (C::held)
      body(0);
    else
      for (Column begin = 0; begin < all; begin += distance * kHeld) body(begin);
  }
  // Calls body with the number of visible vectors of a thread as a compile-time constant, so that
  // vectors need no check. Rows that share a warp use the maximum.
  template <class Body>
  __device__ __forceinline__ void with_count(const Team& team, const Body& body) const {
    if constexpr (C::counted) {
      constexpr int kShift = std::countr_zero(unsigned{kSize});
      const int vectors = (seen + team.lane() * kSize + distance - 1) >> (team.shift + kShift);
      static_assert(kHeld == 4);
      switch (__reduce_max_sync(~0u, vectors)) {
        case 4:
          return body(Count<4>());
        case 3:
          return body(Count<3>());
        case 2:
          return body(Count<2>());
        default:
          return body(Count<1>());
      }
    } else {
      body(Count<kHeld>());
    }
  }
  // Calls body with the index of every vector and the number of its visible columns, which may be
  // less than its size, and for counted and sorted rows zero or negative.
  template <int n, class Body>
  __device__ __forceinline__ void each_vector(Count<n>, Column begin, const Body& body) const {
    if (C::whole && seen <= 0) return;
#pragma unroll
    for (int k = 0; k < n; ++k) {
      const Column left = seen - begin - k * distance;
      if constexpr (C::whole)
        body(k, Column{kSize});
      else if (kSorted ? k < any : C::counted || !backward || left > 0)
        body(k, left);
    }
  }

  // The mask of a vector with `left` visible columns.
  __device__ void set_masked(Vector& x, Column at, Column left) const {
    alignas(8) uint8_t bytes[8] = {};
    auto& own = reinterpret_cast<uint8_t(&)[kSize]>(bytes);
    if (left > 0) load_bits(own, mask + at, C::wide ? kSize : left, C::wide ? kSize : 1);
    const auto& marks = reinterpret_cast<const uint32_t(&)[2]>(bytes);
    const uint32_t other[] = {other_than_one(marks[0]), other_than_one(marks[1])};
#pragma unroll
    for (int i = 0; i < kSize; ++i)
      if (!(other[i / 4] & 0x80u << i % 4 * 8)) x.x[i] = Real{kMaskedScore};
  }

  // Loads the vectors from `begin`, with zeros for masked columns.
  template <int n>
  __device__ void load(Count<n>, Stored (&x)[kHeld], const void* from, Column begin) const {
    if (C::whole && seen <= 0) return;
#pragma unroll
    for (int k = 0; k < n; ++k)
      x[k].load(static_cast<const Bits*>(from) + first + begin + k * distance,
                C::whole ? Column{kSize} : seen - begin - k * distance);
  }
  // Stores zeros to the skipped vectors. They are independent of the loads, so the best time is
  // while the loads are outstanding.
  __device__ void store_zeros(void* to, Column begin) const {
    if constexpr (kLeavesOut) {
#pragma unroll
      for (int k = 0; k < kHeld; ++k)
        if (const Column at = begin + k * distance; (kSorted ? k >= any : at >= seen) && at < cols)
          Stored{}.store(static_cast<Bits*>(to) + first + at, cols - at);
    }
  }
  // Vector k, with `left` visible columns, as scores.
  __device__ Vector scores(const Stored& stored, Column begin, int k, Column left,
                           Real scale) const {
    Vector x = stored.numbers();
#pragma unroll
    for (int i = 0; i < kSize; ++i) x.x[i] *= scale;
    if constexpr (C::masked)
      if ((C::held && C::wide) || mask) set_masked(x, begin + k * distance, left);
    if (!C::whole && left < kSize)
#pragma unroll
      for (int i = 0; i < kSize; ++i) x.x[i] = i < left ? x.x[i] : Real{-INFINITY};
    return x;
  }
  // Stores the vectors that are not skipped: numbers(k), with zeros for masked columns.
  template <int n, class Numbers>
  __device__ void store(Count<n> count, void* to, Column begin, const Numbers& numbers) const {
    Bits* const out = static_cast<Bits*>(to) + first + begin;
    each_vector(count, begin, [&](int k, Column left) {
      Stored y;
      y.set(numbers(k));
      if (!C::whole && (kSorted ? k >= all : left < kSize)) y.end_at(static_cast<int>(left));
      y.store(out + k * distance, C::whole || C::counted ? left : cols - begin - k * distance);
    });
  }
};

template <class Real, class Combine>
__device__ Real combined(const Real (&sums)[kSums], const Team& team, int side,
                         const Combine& combine) {
  const Real low = combine(sums[0], sums[1]), high = combine(sums[2], sums[3]);
  return reduced(combine(low, high), team, side, combine);
}

template <class C>
__global__ void __launch_bounds__(kMostThreads, 2)
    softmax_forward(const tea_scaled_softmax a, const typename Row<C, false>::Real scale,
                    const Team team) {
  using R = Row<C, false>;
  using Real = typename R::Real;
  using Column = typename R::Column;
  const int64_t rows = a.batch * a.heads * a.rows;
  // CTAs stay converged: `line` is that of the CTA's first team.
  const int64_t own = threadIdx.x >> team.shift;
  for (int64_t line = team.index() - own; line < rows; line += team.count()) {
    const int64_t at = line + own;
    const R row(a, at, at - quotient(at, a.rows) * a.rows, team);
    const auto each_part = [&](const auto& body) {
      R::each_part(static_cast<Column>(a.cols), row.distance, body);
    };
    row.with_count(team, [&](auto count) {
      typename R::Vector x[kHeld];
      const auto load = [&](Column begin, const auto& use) {
        typename R::Stored stored[kHeld];
        row.load(count, stored, a.input, begin);
        row.store_zeros(a.output, begin);
        row.each_vector(count, begin, [&](int k, Column left) {
          x[k] = row.scores(stored[k], begin, k, left, scale);
#pragma unroll
          for (int i = 0; i < R::kSize; ++i) use(x[k].x[i], i);
        });
      };
      Real most[kSums] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY}, sums[kSums] = {};
      each_part([&](Column begin) {
        load(begin,
             [&](Real& score, int i) { most[i % kSums] = Largest()(most[i % kSums], score); });
      });
      const Real largest = combined(most, team, 0, Largest());
      const auto exponentiate = [&](Real& score, int i) {
        sums[i % kSums] += score = exponential(score - largest);
      };
      each_part([&](Column begin) {
        if constexpr (!C::held)
          load(begin, exponentiate);
        else
          row.each_vector(count, begin, [&](int k, Column) {
#pragma unroll
            for (int i = 0; i < R::kSize; ++i) exponentiate(x[k].x[i], i);
          });
      });
      const Real sum = combined(sums, team, 1, Plus());
      const Real factor = row.mask && largest == Real{kMaskedScore} ? 0 : 1 / sum;
      each_part([&](Column begin) {
        if constexpr (!C::held) load(begin, exponentiate);
        row.store(count, a.output, begin, [&](int k) {
#pragma unroll
          for (int i = 0; i < R::kSize; ++i) x[k].x[i] *= factor;
          return x[k];
        });
      });
    });
  }
}

// Vectors stay in their memory format, which takes half the registers of fp32 numbers.
template <class C>
__global__ void __launch_bounds__(kMostThreads, 2)
    softmax_backward(const tea_scaled_softmax a, const Team team) {
  using R = Row<C, true>;
  using Vector = typename R::Vector;
  using Real = typename R::Real;
  using Column = typename R::Column;
  const int64_t rows = a.batch * a.heads * a.rows;
  // CTAs stay converged: `line` is that of the CTA's first team.
  const int64_t own = threadIdx.x >> team.shift;
  int side = 0;
  const auto in_matrix_of = [&](int64_t line) { return line - quotient(line, a.rows) * a.rows; };
  int64_t in_matrix = in_matrix_of(team.index());
  const int64_t step = in_matrix_of(team.count());
  for (int64_t line = team.index() - own; line < rows; line += team.count(), side ^= 1) {
    const R row(a, line + own, in_matrix, team);
    in_matrix += step;
    if (in_matrix >= a.rows) in_matrix -= a.rows;
    const auto each_part = [&](const auto& body) {
      R::each_part(static_cast<Column>(a.cols), row.distance, body);
    };
    constexpr Count<kHeld> count;
    typename R::Stored y[kHeld], dy[kHeld];
    const auto load = [&](Column begin) {
      row.load(count, y, a.input, begin);
      row.load(count, dy, a.dout, begin);
    };
    Real sums[kSums] = {};
    each_part([&](Column begin) {
      load(begin);
      row.each_vector(count, begin, [&](int k, Column left) {
        if (C::wide && !C::whole && (R::kSorted ? k >= row.all : left < R::kSize))
          y[k].end_at(static_cast<int>(left)), dy[k].end_at(static_cast<int>(left));
        const Vector p = y[k].numbers(), dp = dy[k].numbers();
#pragma unroll
        for (int i = 0; i < R::kSize; ++i) sums[i % kSums] += p.x[i] * dp.x[i];
      });
    });
    const Real sum = combined(sums, team, side, Plus());
#pragma unroll
    for (int k = 0; k < kHeld; ++k) y[k].keep(), dy[k].keep();
    each_part([&](Column begin) {
      if constexpr (!C::held) load(begin);
      row.store(count, a.output, begin, [&](int k) {
        const Vector p = y[k].numbers();
        Vector dp = dy[k].numbers();
#pragma unroll
        for (int i = 0; i < R::kSize; ++i) dp.x[i] = Real{a.scale} * p.x[i] * (dp.x[i] - sum);
        return dp;
      });
      row.store_zeros(a.output, begin);  // after the loads, because output may be an input
    });
  }
}

// The launch of a problem: enough threads per row for its registers, at most one CTA.
struct Way {
  Team team;
  bool wide, masked, held, whole, counted;
};

template <int32_t dtype>
Way way_of(const tea_scaled_softmax& a) {
  constexpr int kBytes = sizeof(typename Element<dtype>::Bits), kSize = VectorOf<dtype>::kSize;
  const auto bits = [](const void* address) { return reinterpret_cast<uintptr_t>(address); };
  const Team team = Team::of(a.cols, kHeld * kSize, kMostThreads);
  const bool wide = access_bytes(bits(a.input) | bits(a.dout) | bits(a.output) |
                                 static_cast<uint64_t>(a.cols * kBytes)) == 16 &&
                    bits(a.mask) % kSize == 0;
  const int64_t most = int64_t{team.lanes()} * kHeld * kSize;
  const bool causal =
      a.kind == TEA_SCORE_MASK_CAUSAL || a.kind == TEA_SCORE_MASK_CAUSAL_BOTTOM_RIGHT;
  const bool held = a.cols <= most, whole = wide && a.cols == most && !causal;
  // Not if rows share a warp, because their counts differ. Not in place, because early stores of
  // zeros to the input slow down its loads.
  const bool counted =
      wide && held && !whole && team.lanes() >= kWarp && a.input != a.output && !a.dout;
  return {team, wide, a.mask != nullptr, held, whole, counted};
}

// Calls body with the Config. Unaligned and long rows without a mask use the kernel with a mask.
template <int32_t dtype, class Body>
void with_config(const Way& way, const Body& body) {
  if (!way.held)
    return with_bool(way.wide,
                     [&](auto wide) { body(Config<dtype, wide(), true, false, false, false>()); });
  if (!way.wide) return body(Config<dtype, false, true, true, false, false>());
  with_bool(way.masked, [&](auto masked) {
    if (way.whole) return body(Config<dtype, true, masked(), true, true, false>());
    with_bool(way.counted,
              [&](auto counted) { body(Config<dtype, true, masked(), true, false, counted()>()); });
  });
}

// Many more CTAs than run concurrently, but few enough that each has several rows.
Launch launch_of(const char* name, const tea_scaled_softmax& a, const Team& team,
                 const Place& place) {
  // A team with more than one warp is a CTA, so that its barriers involve no other team.
  const int block = team.lanes() > kWarp ? team.lanes() : kLeastThreads;
  const int64_t threads = a.batch * a.heads * a.rows * team.lanes();
  const int rounds = team.lanes() > kWarp ? kRoundsOfLong : kRoundsOfShort;
  const unsigned most = blocks_at_once(place, rounds * 2 * kMostThreads / block);
  return {name, dim3(std::min(blocks_for(threads, block), most)), dim3(block)};
}

}  // namespace

void softmax_forward_on_gpu(const tea_scaled_softmax& args, double scale, const Place& place) {
  if (long_softmax_forward_on_gpu(args, scale, place)) return;
  with_real(args.dtype, [&](auto dtype) {
    const Way way = way_of<dtype()>(args);
    with_config<dtype()>(way, [&](auto config) {
      using C = decltype(config);
      launch(launch_of("softmax_forward", args, way.team, place), softmax_forward<C>, place, args,
             static_cast<typename Row<C, false>::Real>(scale), way.team);
    });
  });
}

void softmax_backward_on_gpu(const tea_scaled_softmax& args, const Place& place) {
  if (long_softmax_backward_on_gpu(args, place)) return;
  with_real(args.dtype, [&](auto dtype) {
    const Way way = way_of<dtype()>(args);
    with_config<dtype()>(way, [&](auto config) {
      using G = decltype(config);
      using C = Config<G::dtype, G::wide, false, G::held, G::whole, false>;
      launch(launch_of("softmax_backward", args, way.team, place), softmax_backward<C>, place, args,
             way.team);
    });
  });
}

}  // namespace tea
