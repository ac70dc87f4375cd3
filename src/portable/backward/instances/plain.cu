// The main backward kernels without score modifications. They must not spill: CMakeLists.txt makes
// the warning an error.
#include "portable/backward/kernel.cuh"

namespace tea::portable {

void launch_plain_main(int tile, const BackwardArguments& work, cudaStream_t stream) {
  find_launcher<BackwardLaunch, 0, kNumPlainBackwardTiles>(tile, work.args)(work, stream);
}

}  // namespace tea::portable
