// The schedule of context parallelism: which rank computes which block of (query, key) pairs, and
// which rows of K and V travel. Contract in te_attention_cp.h.
#pragma once
#include <vector>

#include "math/mask.h"
#include "te_attention_cp.h"

namespace tea {

struct CpSchedule {
  std::vector<tea_cp_part> parts;
  std::vector<tea_cp_move> moves;
};

// Throws Error(TEA_INVALID) that names the field.
CpSchedule cp_schedule(const tea_cp_shape& shape);

// Pairs (i, j), i in [0, rows), j in [0, cols), with band.lo <= j - i <= band.hi.
int64_t pairs_in_band(const Band& band, int64_t rows, int64_t cols);

}  // namespace tea
