// The keep decisions of dropout as bytes, for tests and for attention that keeps its scores.
#pragma once
#include "ops/args.h"

namespace tea {
void dropout_keep(const tea_dropout_mask& args, const Place& place);
}  // namespace tea
