// The kernels for fp32: device/forward.cuh compiled for them.
#include "portable/device/forward_launch.cuh"

namespace tea::portable {

void launch_fp32(int number, Parameters& p, int64_t blocks, cudaStream_t stream) {
  launch_variants<kAnyFp32>(number, p, blocks, stream);
}

}  // namespace tea::portable
