// The Hopper engine: translates Problem and Run into the arguments of a launch, and refuses what
// TMA and the kernels cannot do.
#include "hopper/engine.h"

#include <cstring>

#include "core/driver.h"
#include "core/error.h"
#include "hopper/forward/config.h"
#include "hopper/forward/forward.h"

namespace tea::hopper {
namespace {

constexpr uint64_t kCounterBytes = 256;  // more than needed, and the workspace stays aligned
static_assert(kCounterBytes >= kTileCounterBytes);
constexpr int kFewRows = 64;  // the rows of one consumer warpgroup

// Whether needs_tile_counter() may hold for some extents of the problem.
bool may_need_tile_counter(const Problem& p) {
  return p.q_form || p.kv_form || p.causal || p.window_left || p.window_right ||
         kTiles[find_tile(p.dim_qk, p.v_dim())].block_m() > 128;
}

// ------------------------------------------------------------------------------------------ run

int32_t narrow(int64_t rows, const char* what) {
  if (rows > kMaxSeqlen)
    throw Error(TEA_UNSUPPORTED, std::string(what) + " is " + shown(rows) +
                                     "; hopper needs at most " + shown(kMaxSeqlen));
  return static_cast<int32_t>(rows);
}

StridedTensor strided(void* data, const tea_strides& s) { return {data, s.batch, s.head, s.seq}; }

SequenceLayout queries(const Problem& p, const Run& run) {
  const bool gaps = p.gaps && p.q_form == TEA_RAGGED;
  return {static_cast<Form>(p.q_form), narrow(run.size.max_q, "the longest query sequence"),
          narrow(run.size.tokens_q, "run.tokens_q"), run.as<const int32_t>(TEA_CU_SEQLENS_Q),
          gaps ? run.as<const int32_t>(TEA_OFFSETS_Q) : nullptr};
}
SequenceLayout keys(const Problem& p, const Run& run) {
  const bool gaps = p.gaps && p.kv_form == TEA_RAGGED;
  return {static_cast<Form>(p.kv_form), narrow(run.size.max_kv, "the longest key sequence"),
          narrow(run.size.tokens_kv, "run.tokens_kv"), run.as<const int32_t>(TEA_CU_SEQLENS_KV),
          gaps ? run.as<const int32_t>(TEA_OFFSETS_KV) : nullptr};
}
static_assert(+TEA_DENSE == static_cast<int>(Form::kDense) &&
              +TEA_PADDED == static_cast<int>(Form::kPadded) &&
              +TEA_RAGGED == static_cast<int>(Form::kRagged));

ScoreModArguments score_mod(const Problem& p, const Run& run) {
  const tea_bias_strides& s = run.size.bias;
  ScoreModArguments g = {};
  if (p.bias) g.bias = run.tensor[TEA_BIAS];
  g.bias_batch = s.batch, g.bias_head = s.head, g.bias_row = s.row, g.bias_col = s.col;
  g.bias_is_fp32 = p.bias_type() == TEA_FP32;
  g.bias_before_scale = p.bias == TEA_BIAS_PRE_SCALE;
  g.alibi = p.alibi != TEA_ALIBI_NONE;
  if (p.alibi == TEA_ALIBI_SLOPES) g.slopes = run.as<const float>(TEA_SLOPES);
  g.slopes_batch = run.size.slopes;
  g.softcap = p.softcap;
  if (p.drops()) g.dropout = p.dropout, g.rng_state = run.as<const int64_t>(TEA_RNG_STATE);
  return g;
}

ForwardArguments make_arguments(const Problem& p, const Run& run) {
  const Geometry& size = run.size;
  ForwardArguments f = {};
  // Empty tensors may be NULL. Nothing of them is read, but a tensor map cannot be encoded for
  // NULL.
  const auto memory = [&](tea_tensor t, tea_tensor other) {
    return run.tensor[run.tensor[t] ? t : other];
  };
  f.q = strided(run.tensor[TEA_Q], size.q), f.k = strided(memory(TEA_K, TEA_O), size.k);
  f.v = strided(memory(TEA_V, TEA_O), size.v), f.o = strided(memory(TEA_O, TEA_Q), size.o);
  if (p.writes_lse()) f.lse = strided(run.tensor[TEA_LSE], size.lse);
  if (p.outputs & TEA_OUTPUT_MAX) f.max = strided(run.tensor[TEA_MAX], size.lse);
  if (p.outputs & TEA_OUTPUT_SUM_EXP) f.sum_exp = strided(run.tensor[TEA_SUM_EXP], size.lse);
  f.queries = queries(p, run), f.keys = keys(p, run);
  f.mask = p.mask();
  std::memcpy(f.origin, run.origin, sizeof f.origin);
  f.origin_device = run.origin_device, f.status = run.status;
  f.sink = p.softmax == TEA_SOFTMAX_LEARNABLE    ? Sink::kTensor
           : p.softmax == TEA_SOFTMAX_OFF_BY_ONE ? Sink::kZero
                                                 : Sink::kNone;
  f.sinks = run.as<const float>(TEA_SINK);
  f.counter = run.workspace;
  f.is_fp16 = p.dtype == TEA_FP16;
  f.batch = narrow(size.batch, "the batch");
  f.heads = p.heads_q, f.heads_kv = p.heads_kv, f.dim = p.dim_qk, f.dim_v = p.v_dim();
  f.scale = static_cast<float>(p.scale_value());
  f.score_mod = score_mod(p, run);
  return f;
}

struct Hopper : Executable {
  Problem problem;
  int device;
  Hopper(const Problem& p, int index) : problem(p), device(index) {}

  void forward(const Run& run) const override {
    if (!run.tensor[TEA_Q]) return;  // no query row
    const driver::OnDevice current(device);
    const Outcome outcome = hopper::forward(make_arguments(problem, run), run.stream);
    if (outcome.code)
      throw Error(TEA_FAILED, "hopper: " + std::string(outcome.what) + ": " + outcome.text);
  }
  void backward(const Run&) const override {
    throw Error(TEA_UNSUPPORTED, "hopper has no backward pass of its own");
  }
};

// ----------------------------------------------------------------------------------------- plan

// The first stride that TMA cannot address, as text; empty if there is none.
std::string bad_stride(const Problem& p) {
  const Geometry size = default_geometry(p);
  const struct {
    const char* name;
    const tea_strides& s;
  } rows[] = {{"q", size.q}, {"k", size.k}, {"v", size.v}, {"o", size.o}};
  for (const auto& row : rows)
    for (const int64_t stride : {row.s.batch, row.s.seq, row.s.head})
      if (stride % 8 || stride >= int64_t{1} << 39)
        return "a stride of " + std::string(row.name) + " is " + shown(stride) +
               "; needs a multiple of 8, less than 2^39";
  return "";
}

}  // namespace

Attempt plan(const Problem& p, const Device& device) {
  TEA_REFUSE_IF(device.is_host(), "device is the host; it runs on GPUs of compute capability 9.0");
  TEA_REFUSE_IF(device.sm != 90, "compute capability is " + shown(device.sm) + " tenths; needs 90");
  TEA_REFUSE_IF(find_tile(p.dim_qk, p.v_dim()) < 0, "dim_qk is " + shown(p.dim_qk) + " and dim_v " +
                                                        shown(p.v_dim()) + "; needs at most 256");
  TEA_REFUSE_IF(p.alignment && p.alignment < 16,
                "alignment is " + shown(p.alignment) + "; needs 16 or more");
  TEA_REFUSE_IF(p.seqlen_q > kMaxSeqlen,
                "seqlen_q is " + shown(p.seqlen_q) + "; needs at most 2^30");
  TEA_REFUSE_IF(p.seqlen_kv > kMaxSeqlen,
                "seqlen_kv is " + shown(p.seqlen_kv) + "; needs at most 2^30");
  const std::string stride = bad_stride(p);
  TEA_REFUSE_IF(!stride.empty(), stride);
  auto ready = std::make_unique<Hopper>(p, device.index);
  if (p.q_form != TEA_RAGGED && p.seqlen_q < kFewRows)
    ready->yields = "few queries: heads packed into a tile and split keys are faster";
  return ready;
}

uint64_t workspace(const Problem& p, const Geometry& size) {
  const bool sixteen_bits = p.dtype == TEA_FP16 || p.dtype == TEA_BF16;
  return sixteen_bits && size.batch && may_need_tile_counter(p) ? kCounterBytes : 0;
}

}  // namespace tea::hopper
