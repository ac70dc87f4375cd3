// The backward kernels in fp16.
#include "hopper/backward/launch.cuh"

namespace tea::hopper::backward {

template Outcome launch<0, Type::kFp16>(KernelParams*, cudaStream_t);
template Outcome launch<1, Type::kFp16>(KernelParams*, cudaStream_t);
template Outcome launch<2, Type::kFp16>(KernelParams*, cudaStream_t);

}  // namespace tea::hopper::backward
