// The forward kernels of fp32.
#include "portable/forward/launch.cuh"

namespace tea::portable {

template Launcher find_launcher<Variant::kFp32>(int tile);

}  // namespace tea::portable
