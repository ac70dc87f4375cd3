// The main backward kernels with any option.
#include "portable/backward/kernel.cuh"

namespace tea::portable {

void launch_general_main(int tile, const BackwardArguments& work, cudaStream_t stream) {
  find_launcher<BackwardLaunch, kNumPlainBackwardTiles, kNumBackwardTiles - kNumPlainBackwardTiles>(
      tile, work.args)(work, stream);
}

}  // namespace tea::portable
