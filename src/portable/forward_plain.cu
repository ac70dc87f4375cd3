// The plain kernels, for 16-bit types: device/forward.cuh compiled for them.
#include "portable/device/forward_launch.cuh"

namespace tea::portable {

void launch_plain(int number, Parameters& p, int64_t blocks, cudaStream_t stream) {
  launch_variants<kPlainBf16, kPlainFp16>(number, p, blocks, stream);
}

}  // namespace tea::portable
