// The forward kernels with dropout and nothing else that changes scores or weights, for the head
// dimension where the general ones are far from the plain ones.
#include "hopper/forward_launch.cuh"

namespace tea::hopper {
namespace {

// Of the table's rows the first.
struct Dropped {
  static constexpr Row rows[] = {kTable[0]};
  static constexpr Kind kind = Kind::kDropped;
  static constexpr int types = 2, count = 1;
};

}  // namespace

bool has_dropped(int row) { return row == 0; }

Outcome launch_dropped(int row, const Forward& f, cudaStream_t stream) {
  return launch_row<Dropped>(row, f, stream);
}

}  // namespace tea::hopper
