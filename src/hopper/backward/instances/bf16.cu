// The backward kernels in bf16.
#include "hopper/backward/launch.cuh"

namespace tea::hopper::backward {

template Outcome launch<0, Type::kBf16>(KernelParams*, cudaStream_t);
template Outcome launch<1, Type::kBf16>(KernelParams*, cudaStream_t);
template Outcome launch<2, Type::kBf16>(KernelParams*, cudaStream_t);

}  // namespace tea::hopper::backward
