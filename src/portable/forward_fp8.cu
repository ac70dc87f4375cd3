// The kernels for fp8: device/forward.cuh compiled for them.
#include "portable/device/forward_launch.cuh"

namespace tea::portable {

void launch_fp8(int number, Parameters& p, int64_t blocks, cudaStream_t stream) {
  launch_variants<kAnyFp8>(number, p, blocks, stream);
}

}  // namespace tea::portable
