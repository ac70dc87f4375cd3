// The forward kernels of 16-bit types with any option.
#include "portable/forward/launch.cuh"

namespace tea::portable {

template Launcher find_launcher<Variant::kGeneralBf16>(int tile);
template Launcher find_launcher<Variant::kGeneralFp16>(int tile);

}  // namespace tea::portable
