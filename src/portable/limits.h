// What the kernels of this engine cannot count. The forward pass counts rows in 64 bits and takes
// as many launches as it needs: it has no limit.
#pragma once
#include <string>

#include "core/geometry.h"

namespace tea::portable {

// Which size is too large for the backward pass, as "NAME is SEEN; needs ..."; empty: none.
std::string backward_limit(const Problem& problem, const Geometry& size);

}  // namespace tea::portable
