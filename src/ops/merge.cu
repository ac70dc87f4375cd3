// Merging by LSE. Threads of one warp share a row of a head. Each computes the factors and sums its
// own elements over all parts before it writes them, so that the result may overwrite a part.
#include "ops/launch.cuh"
#include "ops/merge.h"
#include "ops/vectors.cuh"

namespace tea {
namespace {

constexpr int kMostParts = 120;  // the pointers fit into the kernel's parameters
constexpr int kUnderWay = 2;     // outstanding vectors per thread

struct Merge {
  tea_merge a;
  MergeStrides at;
  Team team;  // the threads of a row, at most a warp
  const void* o[kMostParts];
  const void* lse[kMostParts];
};

template <int32_t part, int32_t result, bool wide>
__global__ void __launch_bounds__(kBlock, 4) merge(const __grid_constant__ Merge m) {
  using Real = std::conditional_t<part == TEA_FP64 || result == TEA_FP64, double, float>;
  using Lse = std::conditional_t<part == TEA_FP64, double, float>;
  using Stored = RowVector<part, wide>;
  using Part = typename Stored::Numbers;
  using Result = VectorOf<result, Part::kSize>;
  const tea_merge& a = m.a;
  const int lane = m.team.lane(), lanes = m.team.lanes(), in_warp = threadIdx.x % 32;
  const int64_t rows = a.batch * a.rows * a.heads;
  // Warps stay converged, because the LSE is written after all threads have read it.
  for (int64_t first = (thread_index() - in_warp) >> m.team.shift; first < rows;
       first += m.team.count()) {
    const int64_t i = first + (in_warp >> m.team.shift), line = quotient(i, a.heads);
    const int64_t b = quotient(line, a.rows);
    const MergeRow p = {b, line - b * a.rows, i - line * a.heads};
    const bool active = i < rows;
    const int64_t lse_at = active ? p.in(m.at.part_lse) : 0;
    const auto lse_of = [&](int32_t n) { return static_cast<const Lse*>(m.lse[n])[lse_at]; };
    Real lse = 0;
    bool known = false;
    for (int64_t v = lane * Part::kSize; active && v < a.dim;
         v += kUnderWay * lanes * Part::kSize) {
      Real sum[kUnderWay][Part::kSize] = {};
      const int64_t distance = int64_t{lanes} * Part::kSize;
      const auto load = [&](Stored(&to)[kUnderWay], int32_t n) {
        const auto* const from =
            static_cast<const typename Part::Bits*>(m.o[n]) + p.in(m.at.part_o) + v;
#pragma unroll
        for (int k = 0; k < kUnderWay; ++k)
          to[k].load(from + k * distance, a.dim - v - k * distance);
      };
      const auto add = [&](const Stored(&stored)[kUnderWay], Lse part_lse) {
        const Real weight = merge_weight<Real>(part_lse, lse);
        if (weight == 0) return;  // O of an empty part must not be read
#pragma unroll
        for (int k = 0; k < kUnderWay; ++k) {
          const Part x = stored[k].numbers();
#pragma unroll
          for (int c = 0; c < Part::kSize; ++c) sum[k][c] += weight * Real(x.x[c]);
        }
      };
      Stored next[kUnderWay];
      load(next, 0);
      if (a.parts == 2) {  // all loads of the row are outstanding at once
        Stored other[kUnderWay];
        load(other, 1);
        const Lse both[] = {lse_of(0), lse_of(1)};
        if (!known) lse = merged_lse<Real>(2, [&](int32_t n) { return both[n]; }), known = true;
        add(next, both[0]), add(other, both[1]);
      } else {
        if (!known) lse = merged_lse<Real>(a.parts, lse_of), known = true;
        for (int32_t n = 0; n < a.parts; ++n) {
          Stored stored[kUnderWay];
#pragma unroll
          for (int k = 0; k < kUnderWay; ++k) stored[k] = next[k];
          if (n + 1 < a.parts) load(next, n + 1);
          add(stored, lse_of(n));
        }
      }
      auto* const to = static_cast<typename Result::Bits*>(a.o) + p.in(m.at.o);
#pragma unroll
      for (int k = 0; k < kUnderWay; ++k) {
        const int64_t at = v + k * distance;
        Result y;
#pragma unroll
        for (int c = 0; c < Part::kSize; ++c)
          y.x[c] = static_cast<typename Result::Format::Real>(sum[k][c]);
        if constexpr (wide) {
          if (at < a.dim) y.store_whole(to + at);
        } else {
          y.store(to + at, a.dim - at, 1);
        }
      }
    }
    if (!known) lse = merged_lse<Real>(active ? a.parts : 0, lse_of);
    __syncwarp();
    if (active && lane == 0 && a.lse)
      static_cast<Lse*>(a.lse)[p.in(m.at.lse)] = static_cast<Lse>(lse);
  }
}

int access_of(uint64_t addresses, const tea_strides& stride, int bytes) {
  const auto distance = [&](int64_t elements) { return static_cast<uint64_t>(elements * bytes); };
  return access_bytes(addresses | distance(stride.batch) | distance(stride.seq) |
                      distance(stride.head));
}

}  // namespace

void merge_on_gpu(const tea_merge& args, const MergeStrides& at, const Place& place) {
  TEA_REQUIRE(args.parts <= kMostParts, "parts", args.parts,
              "at most " + shown(kMostParts) + " on a GPU");
  Merge m{args, at, {}, {}, {}};
  m.a.o_dtype = args.o_dtype ? args.o_dtype : args.part_dtype;
  uint64_t addresses = 0;
  for (int32_t i = 0; i < args.parts; ++i) {
    m.o[i] = args.dim ? args.part_o[i] : nullptr, m.lse[i] = args.part_lse[i];
    addresses |= reinterpret_cast<uintptr_t>(m.o[i]);
  }
  with_real(m.a.part_dtype, [&](auto part) {
    with_real(m.a.o_dtype, [&](auto result) {
      constexpr int kPart = sizeof(typename Element<part()>::Bits);
      constexpr int kResult = sizeof(typename Element<result()>::Bits);
      const uint64_t dim = static_cast<uint64_t>(args.dim * kPart);
      const bool all_wide = access_of(addresses | dim, at.part_o, kPart) == 16 &&
                            access_of(reinterpret_cast<uintptr_t>(args.o), at.o, kResult) == 16;
      m.team = Team::of(args.dim, kUnderWay * VectorOf<part()>::kSize, 32);
      const int64_t rows = args.batch * args.rows * args.heads;
      with_bool(all_wide, [&](auto wide) {
        launch({"merge", blocks_for(rows * m.team.lanes())}, merge<part(), result(), wide()>, place,
               m);
      });
    });
  });
}

}  // namespace tea
