// Capacities: the sizes for which a graph of cuDNN is built. Sizes that only a run specifies are
// rounded up, so that runs of similar sizes share a graph.
#pragma once
#include <algorithm>
#include <bit>
#include <compare>
#include <cstdint>

#include "core/geometry.h"

namespace tea::cudnn {

inline bool is_dense(const Problem& p) { return p.q_form == TEA_DENSE && p.kv_form == TEA_DENSE; }

struct Capacity {
  int64_t batch, max_q, max_kv;
  int64_t tokens_q, tokens_kv;            // of ragged sides, else 0
  int64_t pages_k, pages_v, table_pages;  // of paged keys, else 0
  auto operator<=>(const Capacity&) const = default;
};

// The least multiple of an eighth of n's power of two, and of `step`, that holds n: at most an
// eighth is wasted once n is large.
constexpr int64_t rounded_up(int64_t n, int64_t step) {
  const auto power =
      static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(std::max<int64_t>(n, 1))));
  const int64_t unit = std::max(step, power / 8);
  return std::max<int64_t>((n + unit - 1) / unit, 1) * unit;
}

inline constexpr int64_t kRowStep = 64;
inline constexpr int64_t kMostSequences = 65535;  // blocks of a grid in its third dimension

// Sizes that the problem itself gives stay as they are.
inline Capacity capacity_of(const Problem& p, const Geometry& size) {
  const auto open = [](bool varies, int64_t n, int64_t step) {
    return varies ? rounded_up(n, step) : n;
  };
  Capacity c{};
  // Of a side that is not ragged cuDNN may write the rows of every sequence, empty or not.
  const bool may_grow = p.varies_q() && p.varies_kv() && size.batch <= kMostSequences;
  c.batch = may_grow ? std::min(rounded_up(size.batch, 1), kMostSequences) : size.batch;
  c.max_q = open(p.varies_q(), size.max_q, kRowStep);
  c.max_kv = open(p.varies_kv(), size.max_kv, kRowStep);
  if (p.varies_q()) c.tokens_q = rounded_up(size.tokens_q, kRowStep);
  if (p.kv_form == TEA_RAGGED) c.tokens_kv = rounded_up(size.tokens_kv, kRowStep);
  if (p.kv_form == TEA_PAGED) {
    // Entries of the tables are clamped to the pool before cuDNN sees them, so a larger one is
    // safe.
    c.pages_k = rounded_up(size.pages_k, 1), c.pages_v = rounded_up(size.pages_v, 1);
    c.table_pages = (c.max_kv + p.page_size - 1) / p.page_size;
  }
  return c;
}

// Whether rows can be without a result: past the end of a sequence, or without a visible key.
inline bool leaves_rows(const Problem& p) {
  return p.q_form || p.kv_form || p.window_left || p.window_right || (p.causal && p.bottom_right);
}

// The sizes with which plan() queries cuDNN if only runs specify the sizes.
inline Capacity example_of(const Problem& p) {
  Geometry size{};
  size.batch = p.varies() ? 2 : p.batch;
  size.max_q = p.varies_q() ? 256 : p.seqlen_q, size.max_kv = p.varies_kv() ? 256 : p.seqlen_kv;
  size.tokens_q = 2 * size.max_q, size.tokens_kv = 2 * size.max_kv;
  if (p.page_size)
    size.pages_k = size.pages_v = 2 * ((size.max_kv + p.page_size - 1) / p.page_size);
  return capacity_of(p, size);
}

}  // namespace tea::cudnn
