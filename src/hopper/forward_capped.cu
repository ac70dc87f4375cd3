// The forward kernels with a soft cap and nothing else that bends scores, for the head dimensions
// where the general ones are far from the plain ones.
#include "hopper/forward_launch.cuh"

namespace tea::hopper {
namespace {

// Of the table's rows the first and the third.
struct Capped {
  static constexpr Row rows[] = {kTable[0], kTable[2]};
  static constexpr Kind kind = Kind::kCapped;
  static constexpr int types = 2, count = 2;
};

}  // namespace

bool has_capped(int row) { return row == 0 || row == 2; }

Outcome launch_capped(int row, const Forward& f, cudaStream_t stream) {
  return launch_row<Capped>(row / 2, f, stream);
}

}  // namespace tea::hopper
