// The forward kernels with a bias, whatever else there is.
#include "hopper/forward_launch.cuh"

namespace tea::hopper {

Outcome launch_biased(int row, const Forward& f, cudaStream_t stream) {
  return launch_row<Table<Kind::kBiased>>(row, f, stream);
}

}  // namespace tea::hopper
