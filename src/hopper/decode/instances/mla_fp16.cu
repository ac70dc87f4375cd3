// The MLA kernel in fp16.
#include "hopper/decode/mla/launch.cuh"

namespace tea::hopper::decode::mla {

template Outcome launch<Type::kFp16>(const KernelParams& params, cudaStream_t stream);

}  // namespace tea::hopper::decode::mla
