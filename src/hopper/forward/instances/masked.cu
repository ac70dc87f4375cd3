// The forward kernels with a mask.
#include "hopper/forward/launch.cuh"

namespace tea::hopper {

template Launcher find_launcher<Variant::kMasked>(int tile, Type type);

}  // namespace tea::hopper
