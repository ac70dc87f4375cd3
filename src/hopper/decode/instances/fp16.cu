// The decoding kernels in fp16.
#include "hopper/decode/launch.cuh"

namespace tea::hopper::decode {

template Launcher find_launcher<Type::kFp16>(bool has_fp8_kv, int tile);

}  // namespace tea::hopper::decode
