// Conversion between ragged (thd) and padded (bshd) batches.
#pragma once
#include "ops/args.h"

namespace tea {
void thd_to_bshd(const tea_thd_convert& args, const Place& place);
void bshd_to_thd(const tea_thd_convert& args, const Place& place);
}  // namespace tea
