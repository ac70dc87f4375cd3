// The forward kernels with a soft cap and no other modification.
#include "hopper/forward/launch.cuh"

namespace tea::hopper {

template Launcher find_launcher<Variant::kSoftcap>(int tile, Type type);

}  // namespace tea::hopper
