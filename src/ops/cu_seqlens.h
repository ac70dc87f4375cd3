// Cumulative sequence lengths from lengths or from a padding mask.
#pragma once
#include "ops/args.h"

namespace tea {
void fill_cu_seqlens(const tea_cu_seqlens& args, const Place& place);
// How many of the first `count` entries are above zero.
int64_t count_positive(const int32_t* values, int64_t count, const Place& place);
}  // namespace tea
