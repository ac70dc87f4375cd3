// The preprocess kernel: -delta, where delta = rowsum(dO * O) - dLSE, and -LSE / scale of every row
// that attends to some key (FlashAttention-2: Dao, 2023), zeros everywhere else; and the sink
// kernel.
#include <algorithm>

#include "gpu/dependent_launch.cuh"
#include "hopper/backward/preprocess.h"
#include "hopper/forward/launch.h"

namespace tea::hopper::backward {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32, kSinkThreads = 1024;
constexpr int kRows = 2;  // of a sequence, which a warp takes at once

template <Type kType>
TEA_DEVICE float2 unpack(uint32_t pair) {
  if constexpr (kType == Type::kFp16)
    return {half_to_float(static_cast<uint16_t>(pair)), half_to_float(pair >> 16)};
  else
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000)};
}

// Eight elements of a tensor from element `at` on.
template <Type kType>
TEA_DEVICE void load_eight(float (&x)[8], const StridedTensor& from, int64_t at) {
  const uint4 packed =
      *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(from.data) + at);
  const uint32_t pairs[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 two = unpack<kType>(pairs[i]);
    x[2 * i] = two.x, x[2 * i + 1] = two.y;
  }
}
TEA_DEVICE void load_eight_fp32(float (&x)[8], const StridedTensor& from, int64_t at) {
  const auto* const fours =
      reinterpret_cast<const float4*>(static_cast<const float*>(from.data) + at);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float4 four = fours[i];
    x[4 * i] = four.x, x[4 * i + 1] = four.y, x[4 * i + 2] = four.z, x[4 * i + 3] = four.w;
  }
}

// Half of x as three bf16 numbers and 0.
TEA_DEVICE uint2 split(float x) {
  float rest = 0.5f * x;
  uint32_t parts[3];
#pragma unroll
  for (uint32_t& part : parts) {
    part = pack_bf16(rest, 0);
    rest -= unpack<Type::kBf16>(part).x;
  }
  return {parts[0] | parts[1] << 16, parts[2]};
}
// The products multiply the parts of either term by 0 in the other one's sum, where infinity and
// NaN would become NaN. A score of infinity becomes a finite one that leaves no probability. That
// of NaN stays, since the gradients of the row's probabilities are NaN too. But delta is infinite
// or NaN if fp16 cannot hold O: then twice the largest bf16 number, with its sign, gives infinity
// there, for NaN too, and dV stays right.
TEA_DEVICE uint2 split_score(float x) {
  constexpr float kLargest = 0x1p127f;
  return split(isnan(x) ? x : fminf(fmaxf(x, -kLargest), kLargest));
}
TEA_DEVICE uint2 split_gradient(float x) {
  const uint32_t largest = 0x7F7F | (__float_as_uint(x) >> 16 & 0x8000);
  return isfinite(x) ? split(x) : uint2{largest, 0};
}
TEA_DEVICE float sum_of(const uint2& parts) {
  const float2 high = unpack<Type::kBf16>(parts.x);
  return 2 * (high.x + high.y + unpack<Type::kBf16>(parts.y).x);
}

// Zeroes a row of all heads, whose first element is `first`. Called by a warp.
TEA_DEVICE void zero_row(const StridedTensor& x, int64_t first, int heads, int dim) {
  const int per_chunk = x.dtype == TEA_FP32 ? 4 : 8;  // elements of 16 bytes
  const int chunks = dim / per_chunk;
  for (int i = lane(); i < heads * chunks; i += 32) {
    const int64_t at = first + i / chunks * x.head + i % chunks * per_chunk;
    *reinterpret_cast<uint4*>(static_cast<char*>(x.data) + at * 16 / per_chunk) = uint4{};
  }
}

// Whether gradients of rows, or of keys, are added to what is there.
TEA_DEVICE bool adds_to(const AttentionArguments& a, bool rows) {
  return a.accumulate & (rows ? TEA_ACCUMULATE_ROWS : TEA_ACCUMULATE_KEYS);
}

// A warp's view of the rows and keys of one sequence.
template <Type kType, int kBlockM>
struct SequenceTask {
  const KernelParams& p;
  const AttentionArguments& a = p.args;
  int batch;
  SequencePair pair;
  Columns rows, keys;  // that take part in attention
  int row_block;

  TEA_DEVICE SequenceTask(const KernelParams& params, int b) : p(params), batch(b) {
    bool valid = true;
    pair = sequence_pair_of(a, b, sequence_of(a.queries, b), sequence_of(a.keys, b), &valid);
    rows = attending_rows(pair), keys = pair.attended;
    if (rows.begin >= rows.end || keys.begin >= keys.end) rows = keys = {0, 0};
    row_block = static_cast<int>(p.work.row_blocks.first(a.queries, kBlockM, b, pair.q.length));
  }
  TEA_DEVICE int attending() const { return static_cast<int>(rows.end - rows.begin); }
  TEA_DEVICE int padded() const { return (attending() + kBlockM - 1) / kBlockM * kBlockM; }

  TEA_DEVICE int64_t batch_offset(const SequenceLayout& layout, int64_t stride) const {
    return layout.form == TEA_RAGGED ? 0 : batch * stride;
  }
  TEA_DEVICE RowTerms& terms_of(int head, int row) const {
    const int64_t block = head * p.work.row_blocks.per_head + row_block + row / kBlockM;
    return p.work.terms[block * kBlockM + row % kBlockM];
  }
  // lse: +infinity if the row has no probabilities.
  TEA_DEVICE void set_terms(int head, int row, float lse, float delta) const {
    terms_of(head, row) = {split_score(-lse * p.inverse_scale), split_gradient(-delta)};
  }

  // Row `row` of those that attend, of all heads: `team` lanes, a power of two, share a head. O may
  // be fp32; a branch within the loop would keep its loads from overlapping.
  template <bool kFp32O>
  TEA_DEVICE void compute_terms(int row, int team) const {
    const int64_t q = pair.q.start + rows.begin + row;
    const int member = lane() % team, first = lane() / team, step = 32 / team;
    const int64_t o = batch_offset(a.queries, a.o.batch) + q * a.o.seq;
    const int64_t dout = batch_offset(a.queries, a.dout.batch) + q * a.dout.seq;
    const RowStatistics& per_row = a.statistics;
    const int64_t at = batch_offset(a.queries, per_row.batch) + q * per_row.seq;
#pragma unroll 4
    for (int base = 0; base < a.heads_q; base += step) {  // all lanes take part in the shuffles
      const int h = base + first;
      const bool is_head = h < a.heads_q;
      float delta = 0;
      for (int d = member * 8; is_head && d < a.dim_v; d += team * 8) {
        float x[8], y[8];
        if constexpr (kFp32O)
          load_eight_fp32(x, a.o, o + h * a.o.head + d);
        else
          load_eight<kType>(x, a.o, o + h * a.o.head + d);
        load_eight<kType>(y, a.dout, dout + h * a.dout.head + d);
#pragma unroll
        for (int i = 0; i < 8; ++i) delta = fmaf(x[i], y[i], delta);
      }
      for (int n = team / 2; n > 0; n /= 2) delta += __shfl_xor_sync(0xffffffff, delta, n);
      if (!is_head || member > 0) continue;
      const float lse = per_row.lse[at + h * per_row.head];
      if (per_row.dlse) delta -= per_row.dlse[at + h * per_row.head];
      // A row whose scores are all -infinity has no probabilities.
      set_terms(h, row, lse == kMinusInfinity ? -kMinusInfinity : lse, delta);
    }
    __syncwarp();
  }
  TEA_DEVICE void zero(const StridedTensor& x, const SequenceLayout& layout, int64_t row, int heads,
                       int dim) const {
    if (!adds_to(a, &layout == &a.queries))
      zero_row(x, batch_offset(layout, x.batch) + row * x.seq, heads, dim);
  }
  // The index-th row that a tensor has for the sequence, without those in `taken`.
  static TEA_DEVICE int64_t other(int64_t index, const Columns& taken) {
    return index < taken.begin ? index : index + taken.end - taken.begin;
  }

  // The rows of dQ: first those that attend, up to a whole row block, then the others.
  TEA_DEVICE int query_tasks() const {
    const int64_t all = a.queries.form == TEA_RAGGED ? pair.q.length : a.queries.max_seqlen;
    return padded() + static_cast<int>(all) - attending();
  }
  TEA_DEVICE void do_query(int index, int team) const {
    if (index < attending() && a.o.dtype == TEA_FP32)
      compute_terms<true>(index, team);
    else if (index < attending())
      compute_terms<false>(index, team);
    else if (index < padded())
      for (int h = lane(); h < a.heads_q; h += 32) set_terms(h, index, -kMinusInfinity, 0);
    else
      zero(a.dq, a.queries, pair.q.start + other(index - padded(), rows), a.heads_q, a.dim_qk);
  }
  // The keys that no row attends to.
  TEA_DEVICE int key_tasks() const {
    const int64_t all = a.keys.form == TEA_RAGGED ? pair.kv.length : a.keys.max_seqlen;
    return static_cast<int>(all - (keys.end - keys.begin));
  }
  TEA_DEVICE void do_key(int index) const {
    const int64_t key = pair.kv.start + other(index, keys);
    zero(a.dk, a.keys, key, a.heads_kv, a.dim_qk);
    zero(a.dv, a.keys, key, a.heads_kv, a.dim_v);
  }
};

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

// Without a number of CTAs, ptxas spills registers in order that four fit.
template <Type kType, int kBlockM>
__global__ void __launch_bounds__(kThreads, 2)
    preprocess_kernel(const __grid_constant__ KernelParams p, int team) {
  const AttentionArguments& a = p.args;
  launch_dependent_grids();
  wait_on_dependent_grids();
  const int warp = static_cast<int>(blockIdx.x) * kWarps + tea::warp();
  const int warps = static_cast<int>(gridDim.x) * kWarps;
  for (int64_t i = int64_t{warp} * 32 + lane(); i < p.work.counters; i += int64_t{warps} * 32)
    p.work.dq_order[i] = 0;
  validate(a, warp * 32 + lane(), warps * 32);
  zero_gaps(a, a.queries, warp, warps);
  zero_gaps(a, a.keys, warp, warps);
  // Tasks of kRows rows or keys, numbered sequence by sequence.
  SequenceSearch search{};
  int sequence, rest;
  const auto tasks_of = [&](int b) {
    const SequenceTask<kType, kBlockM> s(p, b);
    return (s.query_tasks() + kRows - 1) / kRows + (s.key_tasks() + kRows - 1) / kRows;
  };
  for (int number = warp; search.find(number, static_cast<int>(a.batch), tasks_of, sequence, rest);
       number += warps) {
    const SequenceTask<kType, kBlockM> s(p, sequence);
    const int queries = s.query_tasks(), query_tasks = (queries + kRows - 1) / kRows;
    if (rest < query_tasks) {
      for (int i = rest * kRows; i < min(rest * kRows + kRows, queries); ++i) s.do_query(i, team);
    } else {
      const int first = (rest - query_tasks) * kRows;
      for (int i = first; i < min(first + kRows, s.key_tasks()); ++i) s.do_key(i);
    }
    __syncwarp();
  }
}

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

template <Type kType, int kBlockM>
Outcome launch(const KernelParams& p, cudaStream_t stream) {
  int device = 0, sms = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  int team = 1;
  while (team < 32 && team * 8 < p.args.dim_v) team *= 2;
  const int64_t tokens = std::max(p.args.queries.max_seqlen * p.args.batch, p.args.queries.tokens);
  const int64_t ctas = tokens / (kRows * kWarps) + 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = static_cast<unsigned>(std::min<int64_t>(ctas, sms * 8));
  config.blockDim = kThreads, config.stream = stream;
  KernelParams params = p;
  void* arguments[] = {&params, &team};
  const cudaError_t code = launch_dependent(
      reinterpret_cast<const void*>(preprocess_kernel<kType, kBlockM>), config, arguments, true);
  return code == cudaSuccess ? Outcome{} : failure(code, "the launch of the preprocess kernel");
}

}  // namespace

Outcome launch_preprocess(const KernelParams& p, int tile, cudaStream_t stream) {
  const bool half = p.args.q.dtype == TEA_FP16;
  if (kTiles[tile].block_m == 128)
    return half ? launch<Type::kFp16, 128>(p, stream) : launch<Type::kBf16, 128>(p, stream);
  return half ? launch<Type::kFp16, 64>(p, stream) : launch<Type::kBf16, 64>(p, stream);
}

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
