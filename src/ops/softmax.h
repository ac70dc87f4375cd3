// Softmax over rows of scores that are kept in memory, with its gradient.
#pragma once
#include "ops/args.h"

namespace tea {
void scaled_softmax_forward(const tea_scaled_softmax& args, const Place& place);
void scaled_softmax_backward(const tea_scaled_softmax& args, const Place& place);
}  // namespace tea
