// Interleaved QKV to three dense tensors, and the gradients back.
#pragma once
#include "ops/args.h"

namespace tea {
void flash_prepare_forward(const tea_flash_prepare& args, const Place& place);
void flash_prepare_backward(const tea_flash_prepare& args, const Place& place);
}  // namespace tea
