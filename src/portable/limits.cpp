// Rows of a sequence are counted in 32 bits by the backward pass, so are the rows of all heads, and
// a pass is one launch. (Tokens of a buffer and elements of dBias fill any memory before they
// fill a grid.)
#include "portable/limits.h"

#include <algorithm>

#include "core/error.h"

namespace tea::portable {
namespace {

constexpr int64_t kMostRows = (int64_t{1} << 30) - 1;  // sums of two positions fit an int
constexpr int64_t kMostRowsOfHeads = UINT32_MAX, kMostBlocks = INT32_MAX;
constexpr int64_t kLeastTile = 64, kLeastPiece = 64;  // rows, and head dimensions, of a block

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
  const int64_t pieces = (std::max(p.dim_qk, p.v_dim()) + kLeastPiece - 1) / kLeastPiece;
  const Extent extents[] = {
      {open_q ? "run.max_q" : "seqlen_q", "heads_q", g.max_q, p.heads_q},
      {open_kv ? "run.max_kv" : "seqlen_kv", "heads_kv", g.max_kv, p.heads_kv}};
  for (const Extent& s : extents) {
    if (s.rows == 0) continue;  // and no block
    const std::string where = " where " + s.rows_name + " is " + shown(s.rows);
    if (s.rows > kMostRows) return above(s.rows_name, s.rows, kMostRows, "");
    if (s.heads > kMostRowsOfHeads / s.rows)
      return above(s.heads_name, s.heads, kMostRowsOfHeads / s.rows, where);
    const int64_t blocks = (s.rows + kLeastTile - 1) / kLeastTile * s.heads * pieces;
    if (g.batch > kMostBlocks / blocks)
      return above(open_q || open_kv ? "run.batch" : "batch", g.batch, kMostBlocks / blocks,
                   where + " and " + s.heads_name + " " + shown(s.heads));
  }
  return "";
}

}  // namespace tea::portable
