// The decoding kernels in bf16.
#include "hopper/decode/launch.cuh"

namespace tea::hopper::decode {

template Launcher find_launcher<Type::kBf16>(int tile);

}  // namespace tea::hopper::decode
