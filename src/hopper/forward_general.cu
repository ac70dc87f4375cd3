// The forward kernels with ALiBi, soft cap or dropout, or a scale that is not positive.
#include "hopper/forward_launch.cuh"

namespace tea::hopper {

Outcome launch_general(int row, const Forward& f, cudaStream_t stream) {
  return launch_row<Table<Kind::kGeneral>>(row, f, stream);
}

}  // namespace tea::hopper
