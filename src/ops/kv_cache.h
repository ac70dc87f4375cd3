// Appending new tokens to a paged or non-paged KV cache.
#pragma once
#include "ops/args.h"

namespace tea {
void append_kv(const tea_kv_append& args, const Place& place);
}  // namespace tea
