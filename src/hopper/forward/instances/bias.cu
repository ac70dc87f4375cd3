// The forward kernels with a bias and any other modification.
#include "hopper/forward/launch.cuh"

namespace tea::hopper {

template Launcher find_launcher<Variant::kBias>(int tile, Type type);

}  // namespace tea::hopper
