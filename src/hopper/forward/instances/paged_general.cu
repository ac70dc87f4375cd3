// The forward kernels with keys and values in pages and any modification except a bias.
#include "hopper/forward/launch.cuh"
#include "hopper/forward/load_pages.cuh"

namespace tea::hopper {

template Launcher find_launcher<Variant::kPagedGeneral>(int tile, Type type);

}  // namespace tea::hopper
