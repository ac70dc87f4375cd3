// A block takes 64 tokens, marks those that some sequence covers, and clears the others. Sequences
// may lie in any order and overlap; what is nonsense in their metadata has been clamped.
#include <algorithm>

#include "gpu/launch.h"
#include "portable/device/arguments.cuh"
#include "portable/device/load_store.cuh"
#include "portable/gaps.h"

namespace tea::portable {
namespace {

constexpr int kTokens = 64, kThreads = 128, kMost = 2;

struct Parameters {
  AttentionArguments args;
  SequenceLayout side;
  Cleared tensor[kMost];
  int tensors;
  bool per_row;
};

TEA_DEVICE void mark(const Parameters& p, int64_t first, unsigned long long* covered) {
  for (int64_t b = threadIdx.x; b < p.args.batch; b += kThreads) {
    const Sequence s = sequence_of(p.args, p.side, b);
    const int64_t from = max(s.start - first, int64_t{0});
    const int64_t to = min(s.start + s.length - first, int64_t{kTokens});
    if (from >= to) continue;
    const unsigned long long ones = ~0ull >> (kTokens - (to - from));
    atomicOr(covered, ones << from);
  }
}

TEA_DEVICE void clear_rows(const Cleared& t, int64_t token) {
  const int count = t.heads * t.dim;
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads)
    store_float(t.rows.data, t.rows.dtype, token * t.rows.seq + i / t.dim * t.rows.head + i % t.dim,
                0.0f);
}

TEA_DEVICE void clear_per_row(const AttentionArguments& args, int64_t token) {
  for (int64_t h = threadIdx.x; h < args.heads_q; h += kThreads) {
    const int64_t at = token * args.statistics.seq + h * args.statistics.head;
    if (args.statistics.lse) args.statistics.lse[at] = kMinusInfinity;
    if (args.statistics.max) args.statistics.max[at] = kMinusInfinity;
    if (args.statistics.sum_exp) args.statistics.sum_exp[at] = 0;
  }
}

__global__ void __launch_bounds__(kThreads) clear_entry(const __grid_constant__ Parameters p) {
  __shared__ unsigned long long covered;
  const int64_t first = int64_t{blockIdx.x} * kTokens;
  if (threadIdx.x == 0) covered = 0;
  __syncthreads();
  mark(p, first, &covered);
  __syncthreads();
  for (int i = 0; i < kTokens && first + i < p.side.tokens; ++i) {
    if (covered >> i & 1) continue;
    for (int t = 0; t < p.tensors; ++t) clear_rows(p.tensor[t], first + i);
    if (p.per_row) clear_per_row(p.args, first + i);
  }
}

}  // namespace

void clear_gaps(const AttentionArguments& work, const SequenceLayout& side,
                std::initializer_list<Cleared> tensors, bool per_row, void* stream) {
  if (side.form != TEA_RAGGED || side.tokens == 0) return;
  Parameters p{work, side, {}, static_cast<int>(tensors.size()), per_row};
  std::copy(tensors.begin(), tensors.end(), p.tensor);
  const auto blocks = static_cast<unsigned>((side.tokens + kTokens - 1) / kTokens);
  launch({"clearing gaps", blocks, kThreads}, clear_entry, static_cast<cudaStream_t>(stream), p);
}

}  // namespace tea::portable
