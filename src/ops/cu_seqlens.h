// Cumulative sequence lengths from lengths or from a padding mask.
#pragma once
#include "ops/args.h"

namespace tea {
void fill_cu_seqlens(const tea_cu_seqlens& args, const Place& place);
void fill_cu_seqlens_on_gpu(const tea_cu_seqlens& args, const Place& place);

// The number of positive entries among the first `count`. A GPU writes it to *scratch, and this
// function synchronises the stream, because it returns the number.
int64_t count_positive(const int32_t* values, int64_t count, int32_t* scratch, const Place& place);
int64_t count_positive_on_gpu(const int32_t* values, int64_t count, int32_t* scratch,
                              const Place& place);
}  // namespace tea
