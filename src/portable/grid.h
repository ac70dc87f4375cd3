// Launches over grids of any length.
#pragma once
#include <algorithm>
#include <cstdint>

#include "gpu/arguments.h"
#include "gpu/launch.h"

namespace tea::portable {

inline constexpr int64_t kMaxGrid = int64_t{1} << 30;

// One kernel after the other, each of at most args.max_ctas CTAs. p.first_cta: the number of a
// kernel's first CTA.
template <class Params>
void launch_grids(Launch how, void (*kernel)(Params), Params& p, const AttentionArguments& args,
                  int64_t ctas, cudaStream_t stream) {
  const int64_t most = limited_ctas(args, kMaxGrid);
  for (p.first_cta = 0; p.first_cta < ctas; p.first_cta += most) {
    how.grid = static_cast<unsigned>(std::min(most, ctas - p.first_cta));
    launch(how, kernel, stream, p);
  }
}

}  // namespace tea::portable
