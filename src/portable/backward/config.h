// Tile configurations of the backward kernels, and the ones that serve a problem. To add a
// configuration, add it to a table.
#pragma once
#include <algorithm>
#include <iterator>

#include "gpu/arguments.h"
#include "math/load_store.h"

namespace tea::portable {

// Of the main kernel (kernel.cuh).
struct BackwardTile {
  bool general;          // any score modification, alignment, FP8 and dropout; see is_plain()
  int dim;               // the largest of both head dimensions
  int block_m, block_n;  // queries and keys of a tile
  int warps;
  // Warps along the rows of S and dP, of dK and dV, and of dQ.
  int warps_m_scores, warps_m_dkv, warps_m_dq;
  int stages;  // of Q and dO

  constexpr int shared_bytes() const {
    return 2 * (2 * (block_n + stages * block_m) * dim + 2 * block_m * block_n) +
           2 * stages * block_m * 4;
  }
};

// The first configuration that fits serves. The general ones have few elements per thread, so that
// the registers of the score modifications fit. Up to dimension 128 they fit 99 KiB (sm_86, sm_89,
// sm_120) and serve plain problems there, for which the plain ones are too large.
// clang-format off
inline constexpr BackwardTile kBackwardTiles[] = {
    {.general = false, .dim = 64, .block_m = 128, .block_n = 128, .warps = 8,
     .warps_m_scores = 2, .warps_m_dkv = 4, .warps_m_dq = 4, .stages = 2},
    {.general = false, .dim = 128, .block_m = 64, .block_n = 128, .warps = 8,
     .warps_m_scores = 2, .warps_m_dkv = 2, .warps_m_dq = 2, .stages = 2},
    {.general = false, .dim = 256, .block_m = 64, .block_n = 64, .warps = 8,
     .warps_m_scores = 4, .warps_m_dkv = 2, .warps_m_dq = 2, .stages = 2},
    {.general = true, .dim = 64, .block_m = 64, .block_n = 64, .warps = 8,
     .warps_m_scores = 4, .warps_m_dkv = 4, .warps_m_dq = 4, .stages = 2},
    {.general = true, .dim = 128, .block_m = 64, .block_n = 64, .warps = 8,
     .warps_m_scores = 4, .warps_m_dkv = 4, .warps_m_dq = 4, .stages = 1},
    {.general = true, .dim = 256, .block_m = 64, .block_n = 64, .warps = 8,
     .warps_m_scores = 4, .warps_m_dkv = 4, .warps_m_dq = 4, .stages = 2},
};
// clang-format on
inline constexpr int kNumBackwardTiles = static_cast<int>(std::size(kBackwardTiles));
inline constexpr int kNumPlainBackwardTiles = 3;
static_assert(!kBackwardTiles[kNumPlainBackwardTiles - 1].general &&
              kBackwardTiles[kNumPlainBackwardTiles].general);

// Of the kernel for dQ without atomics (dq_kernel.cu).
struct DqTile {
  bool general;  // as above
  int dim;       // the largest of both head dimensions
  int block_m, block_n;
  int mma_m;  // each warp computes 16 * mma_m rows

  constexpr int shared_bytes() const { return 2 * 2 * (block_m + 2 * block_n) * dim; }
};

// The first configuration that fits serves. Each warp has 32 rows where registers allow, so that a
// fragment of K or V serves both of its 16-row operands. Up to dimension 128 they fit 99 KiB.
inline constexpr DqTile kDqTiles[] = {
    {.general = false, .dim = 64, .block_m = 128, .block_n = 64, .mma_m = 2},
    {.general = false, .dim = 128, .block_m = 128, .block_n = 32, .mma_m = 2},
    {.general = false, .dim = 256, .block_m = 128, .block_n = 32, .mma_m = 1},
    {.general = true, .dim = 64, .block_m = 128, .block_n = 64, .mma_m = 1},
    {.general = true, .dim = 128, .block_m = 64, .block_n = 64, .mma_m = 1},
    {.general = true, .dim = 256, .block_m = 64, .block_n = 32, .mma_m = 1},
};

// The template arguments of a kernel's parts.
struct BackwardConfig {
  BackwardTile tile;
  int dtype;  // TEA_BF16 or TEA_FP16
};
struct DqConfig {
  DqTile tile;
  int dtype;
};

// -------------------------------------------------------------------------------------- selection

// The type of operands in shared memory: that of the inputs; for FP8 the type of dO, which holds
// both dO and the FP8 codes exactly.
inline int32_t operand_dtype(const AttentionArguments& a) {
  if (!is_fp8(a.q.dtype)) return a.q.dtype;
  return is_fp8(a.dout.dtype) ? +TEA_FP16 : a.dout.dtype;
}

// Whether the kernels without score modifications serve, which load 16 bytes of any tensor at once.
inline bool is_plain(const AttentionArguments& a) {
  const auto loads = {&a.q, &a.k, &a.v, &a.dout};
  const bool vectorizable = std::all_of(loads.begin(), loads.end(),
                                        [](const StridedTensor* t) { return t->is_vectorizable; });
  return vectorizable && !has_score_mod(a) && !a.has_dropout && a.scale > 0 &&
         operand_dtype(a) == a.q.dtype;
}

// Whether the plain main kernels can store dK or dV: in chunks of 16 bytes, or in fp32. They store
// no other type element by element: with that choice, the kernel for head dimension 128 spills.
inline bool is_stored_by_plain(const StridedTensor& gradient) {
  return gradient.dtype == TEA_FP32 || gradient.is_vectorizable;
}

// Indices of the tables; -1: no configuration fits, and piecewise.cu serves.
struct BackwardSelection {
  int main, dq;
};

// The first configuration that serves both head dimensions, fits `shared_bytes`, and satisfies
// `serves`; -1 if there is none.
template <class Tile, size_t kCount, class Serves>
int find_backward_tile(const Tile (&tiles)[kCount], const AttentionArguments& a, int shared_bytes,
                       const Serves& serves) {
  if (operand_dtype(a) == TEA_FP32) return -1;
  const int dim = std::max(a.dim_qk, a.dim_v);
  const Tile* const found = std::find_if(tiles, tiles + kCount, [&](const Tile& t) {
    return serves(t) && dim <= t.dim && t.shared_bytes() <= shared_bytes;
  });
  return found == tiles + kCount ? -1 : static_cast<int>(found - tiles);
}

// shared_bytes: the largest shared memory of a CTA on the device.
inline BackwardSelection select_backward(const AttentionArguments& a, int shared_bytes) {
  const bool plain = is_plain(a);
  const bool plain_dkv = plain && is_stored_by_plain(a.dk) && is_stored_by_plain(a.dv);
  return {find_backward_tile(kBackwardTiles, a, shared_bytes,
                             [&](const BackwardTile& t) { return t.general || plain_dkv; }),
          find_backward_tile(kDqTiles, a, shared_bytes,
                             [&](const DqTile& t) { return t.general != plain; })};
}

}  // namespace tea::portable
