// Geometry: every size and stride of one execution, with the defaults resolved. Only this file
// combines problem and run, so that no engine interprets a default.
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

// `run` may be NULL for a problem that specifies all sizes; otherwise its sizes (not its pointers)
// are checked and used. Throws Error(TEA_INVALID).
Geometry geometry(const Problem& problem, const tea_run* run);

// The geometry without any check; sizes that only a run specifies are zero.
Geometry default_geometry(const Problem& problem);

// The checks of the strides that do not depend on sizes.
void check_strides(const Problem& problem);

}  // namespace tea
