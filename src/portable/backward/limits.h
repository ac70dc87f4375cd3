// The largest sizes of the backward pass. The forward pass has no limit: it counts rows in 64 bits
// and takes as many launches as a problem needs.
#pragma once
#include <string>

#include "core/geometry.h"

namespace tea::portable {

// The first size that exceeds a limit, as "NAME is SEEN; backward needs at most ..."; empty if none
// does.
std::string backward_limit(const Problem& problem, const Geometry& size);

}  // namespace tea::portable
