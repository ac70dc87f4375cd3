// Geometry: every size and stride of one execution, with the defaults resolved. Problem and run
// meet here and nowhere else, so that no engine interprets a default.
#pragma once
#include "core/problem.h"

namespace tea {

inline constexpr int32_t kDefaultAlignment = 16;

struct Geometry {
  int64_t batch, max_q, max_kv;  // max_*: rows of a dense side, else the bound of its lengths
  int64_t tokens_q, tokens_kv;   // rows of a ragged buffer, else zero
  int64_t pages_k, pages_v, table_pages;  // pages in each pool; pages of a sequence
  tea_strides q, k, v, o, dout, dq, dk, dv, lse;
  tea_bias_strides bias, dbias;  // zero where broadcast
  int64_t slopes, table_k, table_v;
};

// `run` may be NULL for a problem that leaves no size open; otherwise its sizes (not its pointers)
// are checked and used. Throws Error(TEA_INVALID).
Geometry geometry(const Problem& problem, const tea_run* run);

// The same without any check; sizes that only a run knows are zero.
Geometry default_geometry(const Problem& problem);

// What can be said of the strides before the sizes are known.
void check_strides(const Problem& problem);

}  // namespace tea
