// The forward kernels with no mask.
#include "hopper/forward_launch.cuh"

namespace tea::hopper {

Outcome launch_full(int row, const Forward& f, cudaStream_t stream) {
  return launch_row<Table<Kind::kFull>>(row, f, stream);
}

}  // namespace tea::hopper
