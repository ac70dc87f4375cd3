// Exact counts of a problem: visible pairs, floating-point operations and bytes.
#pragma once
#include "core/tensors.h"

namespace tea {
// `run`: sizes, and host pointers to cu_seqlens if the problem has lengths.
tea_cost cost(const Problem& problem, const tea_run* run);
}  // namespace tea
