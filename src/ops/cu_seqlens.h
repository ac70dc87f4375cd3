// Cumulative sequence lengths from lengths or from a padding mask.
#pragma once
#include "ops/args.h"

namespace tea {
void fill_cu_seqlens(const tea_cu_seqlens& args, const Place& place);
void fill_cu_seqlens_on_gpu(const tea_cu_seqlens& args, const Place& place);

// How many of the first `count` entries are above zero. The answer is needed at once: a GPU leaves
// it in *scratch, and its stream is waited for.
int64_t count_positive(const int32_t* values, int64_t count, int32_t* scratch, const Place& place);
int64_t count_positive_on_gpu(const int32_t* values, int64_t count, int32_t* scratch,
                              const Place& place);
}  // namespace tea
