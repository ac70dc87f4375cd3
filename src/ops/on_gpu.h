// Calls of functions that only a build with device code defines.
#pragma once
#include "ops/args.h"

namespace tea {

// `call` is compiled, but does nothing in other builds, where is_host() never returns false.
template <class Call>
void on_gpu(const Call& call) {
  if constexpr (kGpuCode) call();
}

}  // namespace tea
