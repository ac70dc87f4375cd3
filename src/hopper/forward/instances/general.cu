// The forward kernels with any modification except a bias.
#include "hopper/forward/launch.cuh"

namespace tea::hopper {

template Launcher find_launcher<Variant::kGeneral>(int tile, Type type);

}  // namespace tea::hopper
