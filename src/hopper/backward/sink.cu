// The gradient of sinks, from the row terms.
#include "hopper/backward/preprocess.h"
#include "hopper/backward/sequence_task.cuh"
#include "hopper/forward/launch.h"

namespace tea::hopper::backward {
namespace {

constexpr int kSinkThreads = 1024;

// One CTA for each head; rows are added in an order that only the sizes decide. In double
// precision, because a sink far below its row's scores, too small for a float, may meet a delta as
// far above 1.
template <int kBlockM>
__global__ void __launch_bounds__(kSinkThreads)
    sink_kernel(const __grid_constant__ KernelParams p) {
  __shared__ double share[kSinkThreads];
  const AttentionArguments& a = p.args;
  const int head = static_cast<int>(blockIdx.x);
  const double sink = sink_of(a, head);
  double sum = 0;
  for (int b = 0; b < static_cast<int>(a.batch); ++b) {
    const SequenceTask<Type::kBf16, kBlockM> s(p, b);
    const RowStatistics& per_row = a.statistics;
    const int64_t at = s.batch_offset(a.queries, per_row.batch) + head * per_row.head +
                       (s.pair.q.start + s.rows.begin) * per_row.seq;
    for (int i = static_cast<int>(threadIdx.x); i < s.attending(); i += kSinkThreads) {
      const double lse = per_row.lse[at + i * per_row.seq];
      if (lse != kMinusInfinity) sum += exp(sink - lse) * sum_of(s.terms_of(head, i).gradient);
    }
    // Rows that attend to no key have O = 0, so that their delta is -dLSE and their LSE the sink.
    if (!per_row.dlse) continue;
    for (int i = static_cast<int>(threadIdx.x);
         i < static_cast<int>(s.pair.q.length) - s.attending(); i += kSinkThreads) {
      const int64_t row = s.pair.q.start + s.other(i, s.rows);
      sum += per_row.dlse[s.batch_offset(a.queries, per_row.batch) + head * per_row.head +
                          row * per_row.seq];
    }
  }
  share[threadIdx.x] = sum;
  for (int n = kSinkThreads / 2; n > 0; n /= 2) {
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < n) share[threadIdx.x] += share[threadIdx.x + n];
  }
  if (threadIdx.x == 0) a.dsink[head] = static_cast<float>(share[0]);
}

}  // namespace

Outcome launch_sink_gradient(const KernelParams& p, int tile, cudaStream_t stream) {
  if (!p.args.dsink || p.args.heads_q == 0) return {};
  const auto heads = static_cast<unsigned>(p.args.heads_q);
  if (kTiles[tile].block_m == 128)
    sink_kernel<128><<<heads, kSinkThreads, 0, stream>>>(p);
  else
    sink_kernel<64><<<heads, kSinkThreads, 0, stream>>>(p);
  const cudaError_t code = cudaGetLastError();
  return code == cudaSuccess ? Outcome{} : failure(code, "the launch of the sink kernel");
}

}  // namespace tea::hopper::backward
