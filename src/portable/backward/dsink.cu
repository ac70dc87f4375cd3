// The gradient of the sinks.
#include "gpu/launch.h"
#include "portable/backward/buffers.cuh"
#include "portable/backward/launch.h"

namespace tea::portable {
namespace {

constexpr int kThreads = 1024;

// One CTA for each head. Rows are added in an order that depends on the sizes only. In double
// precision, because a sink's probability may be below the smallest float while delta is as far
// above 1.
__global__ void __launch_bounds__(kThreads)
    dsink_kernel(const __grid_constant__ BackwardArguments work) {
  __shared__ double sums[kThreads];
  const AttentionArguments& args = work.args;
  const int64_t head = blockIdx.x;
  const double sink = sink_of(args, head);
  double sum = 0;
  for (int64_t b = 0; b < args.batch; ++b) {
    const SequencePair seq = sequence_pair_of(args, b);
    const float* const delta = work.buffers.delta + first_entry(work, seq, head);
    const float* const lses = args.statistics.lse + first_statistic(args, seq.q, b, head);
    for (int64_t i = threadIdx.x; i < seq.q.length; i += kThreads) {
      const double lse = lses[i * args.statistics.seq];
      if (lse != kMinusInfinity) sum -= exp(sink - lse) * delta[i];
    }
  }
  sums[threadIdx.x] = sum;
  for (int n = kThreads / 2; n > 0; n /= 2) {
    __syncthreads();
    if (threadIdx.x < n) sums[threadIdx.x] += sums[threadIdx.x + n];
  }
  if (threadIdx.x == 0) args.dsink[head] = static_cast<float>(sums[0]);
}

}  // namespace

void launch_dsink(const BackwardArguments& work, cudaStream_t stream) {
  launch({"backward, dsink", static_cast<unsigned>(work.args.heads_q), kThreads}, dsink_kernel,
         stream, work);
}

}  // namespace tea::portable
