// Appending to a KV cache of FP8: each element is divided by its scale and cast. A group of
// adjacent threads casts a head of a token.
#include "ops/kv_cache.h"
#include "ops/launch.cuh"
#include "ops/vectors.cuh"

namespace tea {
namespace {

constexpr int kEach = 4;  // elements of a thread at a time

struct Casts {
  AppendMoves moves[2];
  Team team[2];
};

template <int32_t from, int32_t to>
__global__ void __launch_bounds__(kBlock) append_cast(const __grid_constant__ Casts both) {
  const AppendMoves& m = both.moves[blockIdx.y];
  const Team& team = both.team[blockIdx.y];
  run_checks(m);
  for (int64_t i = team.index(); i < m.moves; i += team.count()) {
    const Move move = m.at(i);
    if (!move.to) continue;
    const float scale = m.scale_of(i);
    const auto* const source = reinterpret_cast<const typename Element<from>::Bits*>(move.from);
    auto* const destination = reinterpret_cast<typename Element<to>::Bits*>(move.to);
    for (int64_t first = team.lane(); first < m.dim; first += kEach * team.lanes())
#pragma unroll
      for (int k = 0; k < kEach; ++k) {
        const int64_t d = first + k * team.lanes();
        if (d < m.dim)
          destination[d] = Element<to>::encode(__fdiv_rn(Element<from>::decode(source[d]), scale));
      }
  }
}

template <class Body>
void with_wide(int32_t dtype, const Body& body) {
  if (dtype == TEA_FP16) return body(std::integral_constant<int32_t, TEA_FP16>());
  if (dtype == TEA_BF16) return body(std::integral_constant<int32_t, TEA_BF16>());
  body(std::integral_constant<int32_t, TEA_FP32>());
}

}  // namespace

void append_cast_on_gpu(const std::vector<AppendMoves>& sides, const Place& place) {
  Casts both{};
  int64_t threads = 0;
  for (size_t i = 0; i < sides.size(); ++i) {
    both.moves[i] = sides[i], both.team[i] = Team::of(sides[i].dim, kEach, kBlock);
    threads = std::max({threads, sides[i].moves * both.team[i].lanes(), sides[i].checks});
  }
  if (!threads) return;
  const dim3 grid(blocks_for(threads), static_cast<unsigned>(sides.size()));
  const tea_kv_append& a = sides[0].a;
  with_wide(a.new_dtype, [&](auto from) {
    with_fp8(a.dtype, [&](auto to) {
      launch({"append_cast", grid}, append_cast<decltype(from)::value, decltype(to)::value>, place,
             both);
    });
  });
}

}  // namespace tea
