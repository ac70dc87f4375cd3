// The forward kernels with dropout and no other modification.
#include "hopper/forward/launch.cuh"

namespace tea::hopper {

template Launcher find_launcher<Variant::kDropout>(int tile, Type type);

}  // namespace tea::hopper
