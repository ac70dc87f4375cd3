// Which kernels a backward pass launches, in which order, and what the workspace holds.
#include "core/error.h"
#include "portable/backward/backward.h"
#include "portable/backward/config.h"
#include "portable/backward/launch.h"
#include "portable/backward/limits.h"
#include "portable/zero_fill.h"

namespace tea::portable {
namespace {

// The workspace: LSE, delta, and the sums of dQ where the main kernel may run with atomics; each a
// multiple of 256 bytes.
struct BackwardMemory {
  int64_t rows;
  int32_t width;
  uint64_t statistic_bytes, dq_bytes;  // of each of LSE and delta; of the sums of dQ
};
BackwardMemory backward_memory(const Problem& p, const Geometry& g) {
  const auto bytes = [](int64_t floats) {
    return static_cast<uint64_t>(floats * 4 + 255) / 256 * 256;
  };
  const int64_t rows = p.q_form == TEA_RAGGED ? g.tokens_q : g.batch * g.max_q;
  const int32_t width = (p.dim_qk + 15) / 16 * 16;
  const bool adds = !p.deterministic && p.dtype != TEA_FP32 && p.dim_qk <= 256 && p.v_dim() <= 256;
  return {rows, width, bytes(rows * p.heads_q), adds ? bytes(rows * p.heads_q * width) : 0};
}

// Zeros in gaps of ragged buffers, which no kernel writes.
void fill_gradient_gaps(const AttentionArguments& a, void* stream) {
  fill_gaps(a, a.queries, {{a.dq, a.heads_q, a.dim_qk}}, false, stream);
  fill_gaps(a, a.keys, {{a.dk, a.heads_kv, a.dim_qk}, {a.dv, a.heads_kv, a.dim_v}}, false, stream);
}

}  // namespace

uint64_t backward_workspace(const Problem& problem, const Geometry& size) {
  const BackwardMemory memory = backward_memory(problem, size);
  return 2 * memory.statistic_bytes + memory.dq_bytes;
}

void backward(const Problem& problem, const Device& device, const Run& run) {
  const std::string limit = backward_limit(problem, run.size);
  if (!limit.empty()) throw Error(TEA_UNSUPPORTED, "portable: " + limit);
  const auto stream = static_cast<cudaStream_t>(run.stream);
  const BackwardMemory memory = backward_memory(problem, run.size);
  BackwardArguments work{make_arguments(problem, run), {}, run.size.batch};
  const BackwardSelection selected = select_backward(work.args, device.shared_bytes);
  char* const workspace = static_cast<char*>(work.args.workspace);
  const bool adds_dq = selected.main >= 0 && memory.dq_bytes > 0;
  char* const dq = adds_dq ? workspace + 2 * memory.statistic_bytes : nullptr;
  work.buffers = {reinterpret_cast<float*>(workspace),
                  reinterpret_cast<float*>(workspace + memory.statistic_bytes),
                  reinterpret_cast<float*>(dq), memory.rows, memory.width};

  fill_gradient_gaps(work.args, run.stream);
  launch_preprocess(work, stream);
  if (selected.main < 0)
    launch_piecewise_dkv(work, stream);
  else if (kBackwardTiles[selected.main].general)
    launch_general_main(selected.main, work, stream);
  else
    launch_plain_main(selected.main, work, stream);
  if (adds_dq)
    launch_postprocess(work, stream);
  else if (selected.dq >= 0)
    launch_dq(selected.dq, work, stream);
  else
    launch_piecewise_dq(work, stream);
  if (work.args.bias.gradient) launch_piecewise_dbias(work, stream);
  if (work.args.dsink) launch_dsink(work, stream);
}

}  // namespace tea::portable
