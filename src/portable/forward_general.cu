// The general kernels for 16-bit types: device/forward.cuh compiled for them.
#include "portable/device/forward_launch.cuh"

namespace tea::portable {

void launch_general(int number, Parameters& p, int64_t blocks, cudaStream_t stream) {
  launch_variants<kAnyBf16, kAnyFp16>(number, p, blocks, stream);
}

}  // namespace tea::portable
