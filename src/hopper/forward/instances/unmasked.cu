// The forward kernels without a mask.
#include "hopper/forward/launch.cuh"

namespace tea::hopper {

template Launcher find_launcher<Variant::kUnmasked>(int tile, Type type);

}  // namespace tea::hopper
