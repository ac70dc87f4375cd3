// The preprocess kernel: -delta, where delta = rowsum(dO * O) - dLSE, and -LSE / scale of every row
// that attends to some key (FlashAttention-2: Dao, 2023), zeros everywhere else.
#include <algorithm>

#include "gpu/dependent_launch.cuh"
#include "hopper/backward/preprocess.h"
#include "hopper/backward/sequence_task.cuh"
#include "hopper/device/ordered_sum.cuh"
#include "hopper/forward/launch.h"

namespace tea::hopper::backward {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int kRows = kTermRows;

// Tokens of ragged tensors that belong to no sequence.
TEA_DEVICE void zero_gaps(const AttentionArguments& a, const SequenceLayout& layout, int warp,
                          int warps) {
  const bool is_q = &layout == &a.queries;
  if (layout.form != TEA_RAGGED || adds_to(a, is_q)) return;
  for (int64_t base = int64_t{warp} * 32; base < layout.tokens; base += int64_t{warps} * 32) {
    const int64_t mine = base + lane();
    const bool outside =
        mine < layout.tokens && !is_in_some_sequence(layout, static_cast<int>(a.batch), mine);
    for (uint32_t left = __ballot_sync(0xffffffff, outside); left; left &= left - 1) {
      const int64_t token = base + __ffs(static_cast<int>(left)) - 1;
      if (is_q) {
        zero_row(a.dq, token * a.dq.seq, a.heads_q, a.dim_qk);
      } else {
        zero_row(a.dk, token * a.dk.seq, a.heads_kv, a.dim_qk);
        zero_row(a.dv, token * a.dv.seq, a.heads_kv, a.dim_v);
      }
    }
  }
}

TEA_DEVICE void validate(const AttentionArguments& a, int thread, int threads) {
  for (int i = thread; i < static_cast<int>(a.batch); i += threads)
    if (!sequence_of(a.queries, i).valid || !sequence_of(a.keys, i).valid)
      report_status(a, TEA_STATUS_BAD_LENGTHS);
  for (int64_t i = thread; i < num_origins(a); i += threads)
    if (!is_origin_valid(a, i)) report_status(a, TEA_STATUS_BAD_ORIGIN);
}

// The units of the first heads that count as converted: none, or both of a row block without rows
// that attend to a key, to which no tile contributes.
template <Type kType, int kBlockM>
TEA_DEVICE void init_conversions(const KernelParams& p, int thread, int threads) {
  if (!p.work.dq_heads) return;
  const int heads = p.args.heads_q, blocks = p.work.row_blocks.of_dense;
  const int first_heads = static_cast<int>(p.args.batch) * heads - p.work.dq_heads;
  for (int i = thread; i < first_heads * blocks; i += threads) {
    const SequenceTask<kType, kBlockM> s(p, i / blocks / heads);
    p.work.dq_converted[i] = i % blocks * kBlockM < s.attending() ? 0 : 2;
  }
}

// All tasks of dense sequences, if tiles wait for single ones of them: in the order of their
// numbers, which is that of the heads (TermRounds).
//
// The tiles begin when every CTA of this grid has called launch_dependent_grids(): all CTAs then
// run or have ended, so that no tile keeps one of them from running, and every word that tiles wait
// for, or count in, is zero. The count of a task is zeroed by every warp that adds to it, and these
// are warps of one CTA, which meet before the first one adds.
template <Type kType, int kBlockM>
TEA_DEVICE void run_single_tasks(const KernelParams& p, int warp, int warps) {
  static_assert(kWarps % TermRounds::kSharers == 0, "a task is shared within a CTA");
  const AttentionArguments& a = p.args;
  const TermTasks& tasks = p.tasks;
  const TermRounds rounds(tasks.task_of(static_cast<int>(a.batch), 0, 0), warps);
  uint32_t* const rows_done = p.work.terms_written;
  for (int round = lane(); rounds.share(round, warp).task < rounds.count; round += 32)
    rows_done[rounds.share(round, warp).task] = 0;
  __threadfence();
  __syncthreads();
  launch_dependent_grids();
  for (int round = 0;; ++round) {
    const auto [task, first_row, rows] = rounds.share(round, warp);
    if (task >= rounds.count) break;
    const int chunk = task / tasks.per_chunk, sequence = chunk / tasks.chunks;
    const int first = (task - chunk * tasks.per_chunk) * kRows + first_row;
    const SequenceTask<kType, kBlockM> s(p, sequence);
    s.do_queries(first, min(first + rows, s.query_tasks()),
                 (chunk - sequence * tasks.chunks) << tasks.chunk_shift);
    __syncwarp();
    if (lane() == 0) add_release(rows_done[task], rows);
  }
  const int per_sequence = static_cast<int>((a.keys.max_seqlen + kRows - 1) / kRows);
  for (int number = warp; number < static_cast<int>(a.batch) * per_sequence; number += warps) {
    const int sequence = number / per_sequence, first = (number - sequence * per_sequence) * kRows;
    const SequenceTask<kType, kBlockM> s(p, sequence);
    for (int i = first; i < min(first + kRows, s.key_tasks()); ++i) s.do_key(i);
  }
}

// The tasks that a warp has where sequences may differ in length: kRows rows of a chunk of heads,
// or kRows keys, numbered sequence by sequence. All lanes call run(sequence, first row, first head)
// for each, with a negative head for keys. If tiles may wait for the task, one lane then calls
// end(the word that counts the rows that are done).
template <Type kType, int kBlockM, class Run, class End>
TEA_DEVICE void for_each_task(const KernelParams& p, int warp, int warps, Run&& run, End&& end) {
  const TermTasks& tasks = p.tasks;
  const int batch = static_cast<int>(p.args.batch);
  SequenceSearch search{};
  int sequence, rest;
  const auto tasks_of = [&](int b) {
    const SequenceTask<kType, kBlockM> s(p, b);
    return (s.query_tasks() + kRows - 1) / kRows * tasks.chunks +
           (s.key_tasks() + kRows - 1) / kRows;
  };
  for (int number = warp; search.find(number, batch, tasks_of, sequence, rest); number += warps) {
    const SequenceTask<kType, kBlockM> s(p, sequence);
    const int query_tasks = (s.query_tasks() + kRows - 1) / kRows * tasks.chunks;
    if (rest >= query_tasks) {
      run(s, (rest - query_tasks) * kRows, -1);
      continue;
    }
    const int first = rest / tasks.chunks * kRows, head = rest % tasks.chunks << tasks.chunk_shift;
    run(s, first, head);
    __syncwarp();
    if (tasks.per_block && first < s.padded() && lane() == 0)
      end(p.work.terms_written[tasks.task_of(sequence, head, s.row_block) + first / kRows]);
  }
}

// One CTA for each SM: without a number of them, ptxas spills registers in order that more fit.
template <Type kType, int kBlockM>
__global__ void __launch_bounds__(kThreads, 1)
    preprocess_kernel(const __grid_constant__ KernelParams p) {
  const AttentionArguments& a = p.args;
  const TermTasks& tasks = p.tasks;
  if (!tasks.per_chunk) launch_dependent_grids();
  wait_on_dependent_grids();
  const int warp = static_cast<int>(blockIdx.x) * kWarps + tea::warp();
  const int warps = static_cast<int>(gridDim.x) * kWarps;
  for (int64_t i = int64_t{warp} * 32 + lane(); i < p.work.counters; i += int64_t{warps} * 32)
    p.work.dq_order[i] = 0;
  init_conversions<kType, kBlockM>(p, warp * 32 + lane(), warps * 32);
  validate(a, warp * 32 + lane(), warps * 32);
  if (tasks.per_chunk && !tasks.per_block) return run_single_tasks<kType, kBlockM>(p, warp, warps);
  if (tasks.per_chunk) {  // ragged: each word is zeroed by the warp that adds to it
    for_each_task<kType, kBlockM>(
        p, warp, warps, [](const auto&, int, int) {}, [&](uint32_t& rows_done) { rows_done = 0; });
    __threadfence();
    __syncthreads();
    launch_dependent_grids();
  }
  for_each_task<kType, kBlockM>(
      p, warp, warps,
      [&](const auto& s, int first, int first_head) {
        if (first_head >= 0)
          s.do_queries(first, min(first + kRows, s.query_tasks()), first_head);
        else
          for (int i = first; i < min(first + kRows, s.key_tasks()); ++i) s.do_key(i);
      },
      [&](uint32_t& rows_done) { add_release(rows_done, kRows); });
  zero_gaps(a, a.queries, warp, warps);
  zero_gaps(a, a.keys, warp, warps);
}

template <Type kType, int kBlockM>
Outcome launch(const KernelParams& p, cudaStream_t stream) {
  static OncePerDevice allowed;
  const void* const kernel = reinterpret_cast<const void*>(preprocess_kernel<kType, kBlockM>);
  int sms = 0;
  if (const Outcome ready = prepare_launch(kernel, 0, allowed, &sms); ready.code) return ready;
  const auto tasks = [&](const SequenceLayout& layout) {
    return std::max(layout.max_seqlen * p.args.batch, layout.tokens) / kRows + 1;
  };
  int64_t ctas = (tasks(p.args.queries) * p.tasks.chunks + tasks(p.args.keys)) / kWarps + 1;
  if (p.tasks.per_chunk) ctas *= TermRounds::kSharers;  // dense tasks may all be shared
  cudaLaunchConfig_t config = {};
  // All CTAs run at once, one on an SM. Where tiles wait for single tasks, tiles have the other
  // SMs meanwhile.
  const int64_t most = p.tasks.per_chunk ? std::max(sms / 3, 1) : sms;
  config.gridDim = static_cast<unsigned>(std::min(ctas, limited_ctas(p.args, most)));
  config.blockDim = kThreads, config.stream = stream;
  KernelParams params = p;
  void* arguments[] = {&params};
  const cudaError_t code = launch_dependent(kernel, config, arguments, true);
  return code == cudaSuccess ? Outcome{} : failure(code, "the launch of the preprocess kernel");
}

}  // namespace

Outcome launch_preprocess(const KernelParams& p, int tile, cudaStream_t stream) {
  const bool half = p.args.q.dtype == TEA_FP16;
  if (kTiles[tile].block_m == 128)
    return half ? launch<Type::kFp16, 128>(p, stream) : launch<Type::kBf16, 128>(p, stream);
  return half ? launch<Type::kFp16, 64>(p, stream) : launch<Type::kBf16, 64>(p, stream);
}

}  // namespace tea::hopper::backward
