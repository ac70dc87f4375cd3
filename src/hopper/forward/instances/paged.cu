// The forward kernels with keys and values in pages.
#include "hopper/forward/launch.cuh"
#include "hopper/forward/load_pages.cuh"

namespace tea::hopper {

template Launcher find_launcher<Variant::kPaged>(int tile, Type type);

}  // namespace tea::hopper
