// Launches over grids of any length.
#pragma once
#include <algorithm>

#include "gpu/launch.h"
#include "portable/forward/params.h"

namespace tea::portable {

inline constexpr int64_t kMaxGrid = int64_t{1} << 30;

inline void launch_grids(Launch how, void (*kernel)(KernelParams), KernelParams& p, int64_t ctas,
                         cudaStream_t stream) {
  for (p.first_cta = 0; p.first_cta < ctas; p.first_cta += kMaxGrid) {
    how.grid = static_cast<unsigned>(std::min(kMaxGrid, ctas - p.first_cta));
    launch(how, kernel, stream, p);
  }
}

}  // namespace tea::portable
