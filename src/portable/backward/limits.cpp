// The backward kernels count the rows of a sequence, and the rows of all heads, in 32 bits, and
// each of them is one launch. (Tokens of a buffer and elements of dBias need more memory than any
// GPU has before they exceed a grid.)
#include "portable/backward/limits.h"

#include <algorithm>

#include "core/error.h"

namespace tea::portable {
namespace {

constexpr int64_t kMaxRows = (int64_t{1} << 30) - 1;  // sums of two positions fit an int
constexpr int64_t kMaxRowsOfHeads = UINT32_MAX, kMaxCtas = INT32_MAX;
// The fewest rows and head dimensions of a CTA.
constexpr int64_t kMinTileRows = 64, kMinPieceDim = 64;

struct Extent {
  std::string rows_name, heads_name;
  int64_t rows, heads;
};

std::string above(const std::string& name, int64_t seen, int64_t most, const std::string& where) {
  return name + " is " + shown(seen) + "; backward needs at most " + shown(most) + where;
}

}  // namespace

std::string backward_limit(const Problem& p, const Geometry& g) {
  const bool open_q = p.q_form == TEA_RAGGED, open_kv = p.kv_form == TEA_RAGGED;
  const int64_t pieces = (std::max(p.dim_qk, p.v_dim()) + kMinPieceDim - 1) / kMinPieceDim;
  const Extent extents[] = {
      {open_q ? "run.max_q" : "seqlen_q", "heads_q", g.max_q, p.heads_q},
      {open_kv ? "run.max_kv" : "seqlen_kv", "heads_kv", g.max_kv, p.heads_kv}};
  for (const Extent& s : extents) {
    if (s.rows == 0) continue;  // and no CTA
    const std::string where = " where " + s.rows_name + " is " + shown(s.rows);
    if (s.rows > kMaxRows) return above(s.rows_name, s.rows, kMaxRows, "");
    if (s.heads > kMaxRowsOfHeads / s.rows)
      return above(s.heads_name, s.heads, kMaxRowsOfHeads / s.rows, where);
    const int64_t ctas = (s.rows + kMinTileRows - 1) / kMinTileRows * s.heads * pieces;
    if (g.batch > kMaxCtas / ctas)
      return above(open_q || open_kv ? "run.batch" : "batch", g.batch, kMaxCtas / ctas,
                   where + " and " + s.heads_name + " " + shown(s.heads));
  }
  return "";
}

}  // namespace tea::portable
