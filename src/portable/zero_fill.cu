// A CTA finds which of 64 tokens some sequence covers, and clears the others. Sequences may be in
// any order and overlap; their metadata has been clamped where it was invalid.
#include <algorithm>

#include "gpu/launch.h"
#include "portable/arguments.cuh"
#include "portable/device/load_store.cuh"
#include "portable/zero_fill.h"

namespace tea::portable {
namespace {

constexpr int kTokens = 64, kThreads = 128, kMaxTensors = 2;

struct ZeroFillParams {
  AttentionArguments args;
  SequenceLayout layout;
  GapTensor tensor[kMaxTensors];
  int tensors;
  bool fill_statistics;
};

TEA_DEVICE void mark_covered(const ZeroFillParams& p, int64_t first, unsigned long long* covered) {
  for (int64_t b = threadIdx.x; b < p.args.batch; b += kThreads) {
    const Sequence s = sequence_of(p.args, p.layout, b);
    const int64_t from = max(s.start - first, int64_t{0});
    const int64_t to = min(s.start + s.length - first, int64_t{kTokens});
    if (from >= to) continue;
    const unsigned long long ones = ~0ull >> (kTokens - (to - from));
    atomicOr(covered, ones << from);
  }
}

TEA_DEVICE void clear_token(const GapTensor& t, int64_t token) {
  const int count = t.heads * t.dim;
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads)
    store_float(t.rows.data, t.rows.dtype, token * t.rows.seq + i / t.dim * t.rows.head + i % t.dim,
                0.0f);
}

TEA_DEVICE void clear_statistics(const AttentionArguments& args, int64_t token) {
  for (int64_t h = threadIdx.x; h < args.heads_q; h += kThreads) {
    const int64_t at = token * args.statistics.seq + h * args.statistics.head;
    if (args.statistics.lse) args.statistics.lse[at] = kMinusInfinity;
    if (args.statistics.max) args.statistics.max[at] = kMinusInfinity;
    if (args.statistics.sum_exp) args.statistics.sum_exp[at] = 0;
  }
}

__global__ void __launch_bounds__(kThreads)
    zero_fill_kernel(const __grid_constant__ ZeroFillParams p) {
  __shared__ unsigned long long covered;
  const int64_t first = int64_t{blockIdx.x} * kTokens;
  if (threadIdx.x == 0) covered = 0;
  __syncthreads();
  mark_covered(p, first, &covered);
  __syncthreads();
  for (int i = 0; i < kTokens && first + i < p.layout.tokens; ++i) {
    if (covered >> i & 1) continue;
    for (int t = 0; t < p.tensors; ++t) clear_token(p.tensor[t], first + i);
    if (p.fill_statistics) clear_statistics(p.args, first + i);
  }
}

}  // namespace

void fill_gaps(const AttentionArguments& args, const SequenceLayout& layout,
               std::initializer_list<GapTensor> tensors, bool fill_statistics, void* stream) {
  if (layout.form != TEA_RAGGED || layout.tokens == 0) return;
  ZeroFillParams p{args, layout, {}, static_cast<int>(tensors.size()), fill_statistics};
  std::copy(tensors.begin(), tensors.end(), p.tensor);
  const auto ctas = static_cast<unsigned>((layout.tokens + kTokens - 1) / kTokens);
  launch({"zero fill of gaps", ctas, kThreads}, zero_fill_kernel, static_cast<cudaStream_t>(stream),
         p);
}

}  // namespace tea::portable
