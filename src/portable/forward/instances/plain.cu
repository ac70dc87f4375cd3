// The forward kernels of 16-bit types that only scale and mask scores.
#include "portable/forward/launch.cuh"

namespace tea::portable {

template Launcher find_launcher<Variant::kPlainBf16>(int tile);
template Launcher find_launcher<Variant::kPlainFp16>(int tile);

}  // namespace tea::portable
