// The forward kernels under a mask.
#include "hopper/forward_launch.cuh"

namespace tea::hopper {

Outcome launch_masked(int row, const Forward& f, cudaStream_t stream) {
  return launch_row<Table<Kind::kMasked>>(row, f, stream);
}

}  // namespace tea::hopper
