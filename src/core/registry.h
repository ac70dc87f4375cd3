// The engines of this build, in order of preference.
#pragma once
#include <span>

#include "core/engine.h"

namespace tea {
std::span<const Engine> engines();

inline constexpr int kLeastSm = 80;  // the minimum of all engines for GPUs, that of `portable`
}  // namespace tea
