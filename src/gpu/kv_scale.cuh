// The scales of keys and values in FP8.
#pragma once
#include "gpu/arguments.h"
#include "gpu/ptx.cuh"

namespace tea {

// The scale of the keys or values of a kv head. `at`: k_inv or v_inv of args.fp8.
TEA_DEVICE float kv_scale(const AttentionArguments& args, const float* at, int kv_head) {
  return at ? at[kv_head * args.fp8.kv_stride] : 1.0f;
}

}  // namespace tea
