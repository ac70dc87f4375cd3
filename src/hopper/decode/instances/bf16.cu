// The decoding kernels in bf16.
#include "hopper/decode/launch.cuh"

namespace tea::hopper::decode {

template Launcher find_launcher<Type::kBf16>(bool has_fp8_kv, int tile);

}  // namespace tea::hopper::decode
