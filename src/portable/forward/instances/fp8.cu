// The forward kernels of FP8.
#include "portable/forward/launch.cuh"

namespace tea::portable {

template Launcher find_launcher<Variant::kFp8>(int tile);

}  // namespace tea::portable
