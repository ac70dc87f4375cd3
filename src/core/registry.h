// The engines of this build, in order of preference.
#pragma once
#include <span>

#include "core/engine.h"

namespace tea {
std::span<const Engine> engines();
}  // namespace tea
