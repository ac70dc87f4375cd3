// The keep decisions of dropout as bytes, for tests and for attention that keeps its scores.
#pragma once
#include "math/mask.h"
#include "ops/args.h"

namespace tea {

void dropout_keep(const tea_dropout_mask& args, const Place& place);
void dropout_keep_on_gpu(const tea_dropout_mask& args, const Place& place);

// Where this shard lies: dimension i of the origin, clamped if it comes from memory.
TEA_HOST_DEVICE int64_t origin_of(const tea_dropout_mask& a, int i) {
  bool valid = true;  // there is no status to report to
  return a.origin_device ? clamp_origin(a.origin_device[i], &valid) : a.origin[i];
}

}  // namespace tea
