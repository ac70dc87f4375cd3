// The dropout mask as bytes, for tests and for attention with the scores in memory.
#pragma once
#include "math/mask.h"
#include "ops/args.h"

namespace tea {

void dropout_keep(const tea_dropout_mask& args, const Place& place);
void dropout_keep_on_gpu(const tea_dropout_mask& args, const Place& place);

// Dimension i of the shard's origin, clamped if it comes from memory.
TEA_HOST_DEVICE int64_t origin_of(const tea_dropout_mask& a, int i) {
  bool valid = true;  // there is no status to report to
  return a.origin_device ? clamp_origin(a.origin_device[i], &valid) : a.origin[i];
}

}  // namespace tea
