// The Hopper engine: translates Problem and Run into the arguments of a launch, and refuses what
// TMA and the kernels cannot do.
#include "hopper/engine.h"

#include <algorithm>

#include "core/driver.h"
#include "core/error.h"
#include "hopper/backward/backward.h"
#include "hopper/decode/decode.h"
#include "hopper/decode/mla/config.h"
#include "hopper/forward/config.h"
#include "hopper/forward/forward.h"

namespace tea::hopper {
namespace {

constexpr uint64_t kCounterBytes =
    256;  // keeps the alignment of a workspace that is divided further
static_assert(kCounterBytes >= kTileCounterBytes);
constexpr int kFewRows = 64;  // the rows of one consumer warpgroup
// With fewer keys a persistent CTA of the decoding kernels mostly waits between its tiles.
constexpr int kFewKeys = 256;

// The sizes of a run may exceed those that plan() has checked for the problem.
void require_seqlen(int64_t rows, const char* what) {
  if (rows > kMaxSeqlen)
    throw Error(TEA_UNSUPPORTED, std::string(what) + " is " + shown(rows) +
                                     "; hopper needs at most " + shown(kMaxSeqlen));
}

// Why the decoding kernels do not serve a run; empty if they do.
std::string run_decode_limit(const Problem& problem, const AttentionArguments& args) {
  return problem.training ? "training is 1; needs 0" : decode::limit(args);
}

// Rows that belong to no sequence, or whose sequence has no key, are overwritten by zeros, and rows
// of TEA_MAX and TEA_SUM_EXP are not merged.
bool accumulates_forward(const Problem& p) {
  return p.q_form == TEA_DENSE && p.kv_form == TEA_DENSE && !decodes_only(p) &&
         p.o_type() == TEA_FP32 && p.writes_lse() && !(p.outputs & ~TEA_OUTPUT_LSE) &&
         p.softmax == TEA_SOFTMAX_VANILLA;
}
bool accumulates_backward(const Problem& p) {
  return p.training && p.dqkv_type() == TEA_FP32 && p.softmax == TEA_SOFTMAX_VANILLA &&
         backward_limit(p).empty();
}

struct Hopper : Executable {
  Problem problem;
  int device;
  bool decodes_alone;
  Hopper(const Problem& p, int index) : problem(p), device(index), decodes_alone(decodes_only(p)) {}

  void forward(const Run& run) const override {
    if (!run.tensor[TEA_Q]) return;  // no query row
    require_seqlens(run);
    const driver::OnDevice current(device);
    const AttentionArguments args = make_arguments(problem, run);
    const std::string limit = run_decode_limit(problem, args);
    const bool decodes = !run.accumulate && limit.empty();
    if (!decodes && decodes_alone) throw Error(TEA_UNSUPPORTED, "hopper: " + limit);
    require_success(decodes ? decode::run(args, run.stream) : hopper::forward(args, run.stream));
  }
  void backward(const Run& run) const override {
    require_seqlens(run);
    const driver::OnDevice current(device);
    require_success(backward::run(make_arguments(problem, run), run.stream));
  }
  bool accumulates(Direction direction) const override {
    return direction == Direction::kForward ? accumulates_forward(problem)
                                            : accumulates_backward(problem);
  }

 private:
  static void require_seqlens(const Run& run) {
    require_seqlen(run.size.max_q, "the longest query sequence");
    require_seqlen(run.size.max_kv, "the longest key sequence");
    require_seqlen(run.size.tokens_q, "run.tokens_q");
    require_seqlen(run.size.tokens_kv, "run.tokens_kv");
  }
  static void require_success(const Outcome& outcome) {
    if (outcome.code)
      throw Error(TEA_FAILED, "hopper: " + std::string(outcome.what) + ": " + outcome.text);
  }
};

// ----------------------------------------------------------------------------------------- plan

// The first stride that TMA cannot address, as text; empty if there is none.
struct NamedStrides {
  const char* name;
  const tea_strides& s;
  int64_t multiple = 8;  // of 16 bytes
};
std::string bad_stride(std::initializer_list<NamedStrides> rows) {
  for (const auto& row : rows)
    for (const int64_t stride : {row.s.batch, row.s.seq, row.s.head})
      if (stride % row.multiple || stride >= int64_t{1} << 39)
        return "a stride of " + std::string(row.name) + " is " + shown(stride) +
               "; needs a multiple of " + shown(row.multiple) + ", less than 2^39";
  return "";
}

constexpr Known kKnown[] = {
    {"dtype", 1u << TEA_FP16 | 1u << TEA_BF16},
    {"o_dtype", 1u << TEA_FP32},
    {"dout_dtype", 1u << TEA_FP16 | 1u << TEA_BF16},
    {"dqkv_dtype", 1u << TEA_FP32},
    {"bias_dtype", 1u << TEA_FP32},
    {"training", below(2)},
    {"deterministic", below(2)},
    {"outputs", below(3)},
    {"lse_gradient", below(2)},
    {"q_form", below(3)},
    {"kv_form", below(4)},
    {"gaps", below(2)},
    {"causal", below(2)},
    {"bottom_right", below(2)},
    {"window_left"},
    {"window_right"},
    {"bias", below(3)},
    {"bias_broadcast", below(4)},
    {"alibi", below(3)},
    {"softmax", below(3)},
    {"softcap"},
    {"dropout"},
    {"scale"},
    {"has_scale", below(2)},
    {"kv_dtype", 1u << TEA_E4M3 | 1u << TEA_E5M2},
    {"kv_scale", below(2)},
    {"max_ctas"},
    {"batch_invariant", below(2)},
};

// The arguments of a run of which only the sizes are known.
AttentionArguments sized_arguments(const Problem& p, const Geometry& size) {
  Run run{};
  run.size = size;
  return make_arguments(p, run);
}

// Whether the forward kernels serve a problem of the type of q.
bool has_forward_kernel(const Problem& p) {
  return select_kernel(sized_arguments(p, default_geometry(p))).tile >= 0;
}

// Why only the decoding kernels could serve a problem, as the beginning of a refusal.
std::string decode_reason(const Problem& p) {
  if (p.kv_dtype) return "kv_dtype is " + std::string(dtype_name(p.kv_dtype)) + ", where ";
  if (p.batch_invariant) return "batch_invariant is 1, where ";
  if (find_tile(p.dim_qk, p.v_dim()) < 0)
    return "dim_qk is " + shown(p.dim_qk) + " and dim_v " + shown(p.v_dim()) + ", where ";
  if (p.page_size % kPageMultiple)
    return "page_size is " + shown(p.page_size) + ", no multiple of " + shown(kPageMultiple) +
           ", where ";
  return "kv_form is paged and the problem has a bias, where ";
}

// Why the decoding kernels serve no run of a problem; empty if they serve some.
std::string decode_limit(const Problem& p, Geometry size) {
  if (p.q_form == TEA_RAGGED) size.max_q = 1;  // a run may have more
  return run_decode_limit(p, sized_arguments(p, size));
}

}  // namespace

std::span<const Known> known_fields() { return kKnown; }

bool decodes_only(const Problem& p) {
  return p.kv_dtype || p.batch_invariant || !has_forward_kernel(p);
}

bool serves(const Problem& p, const Run& run) {
  return !decodes_only(p) || run_decode_limit(p, make_arguments(p, run)).empty();
}

Attempt plan(const Problem& p, const Device& device) {
  TEA_REFUSE_IF(device.is_host(), "device is the host; it runs on GPUs of compute capability 9.0");
  TEA_REFUSE_IF(device.sm != 90, "compute capability is " + shown(device.sm) + " tenths; needs 90");
  TEA_REFUSE_IF(
      find_tile(p.dim_qk, p.v_dim()) < 0 && !decode::mla::serves_dims(p.dim_qk, p.v_dim()),
      "dim_qk is " + shown(p.dim_qk) + " and dim_v " + shown(p.v_dim()) +
          "; needs at most 256, or in decoding 513 to 576 and at most 512");
  TEA_REFUSE_IF(p.alignment && p.alignment < 16,
                "alignment is " + shown(p.alignment) + "; needs 16 or more");
  TEA_REFUSE_IF(p.seqlen_q > kMaxSeqlen,
                "seqlen_q is " + shown(p.seqlen_q) + "; needs at most 2^30");
  TEA_REFUSE_IF(p.seqlen_kv > kMaxSeqlen,
                "seqlen_kv is " + shown(p.seqlen_kv) + "; needs at most 2^30");
  const Geometry size = default_geometry(p);
  const int64_t of_kv = 16 / dtype_bytes(p.kv_type());
  const std::string stride =
      bad_stride({{"q", size.q}, {"k", size.k, of_kv}, {"v", size.v, of_kv}, {"o", size.o}});
  TEA_REFUSE_IF(!stride.empty(), stride);
  const std::string limit = decode_limit(p, size);
  TEA_REFUSE_IF(decodes_only(p) && !limit.empty(), decode_reason(p) + limit);
  auto ready = std::make_unique<Hopper>(p, device.index);
  if (p.batch_invariant) ready->yields = "bits would depend on whether a chunk has many queries";
  if (p.q_form == TEA_RAGGED) return ready;
  if (!limit.empty() && p.seqlen_q < kFewRows)
    ready->yields = "few queries: heads packed into a tile and split keys are faster";
  if (limit.empty() && !p.varies_kv() && p.seqlen_kv < kFewKeys)
    ready->yields = "few queries and keys: small tiles are faster";
  return ready;
}

std::string backward_limit(const Problem& p) {
  if (p.dout_type() != p.dtype)
    return "dout_dtype is " + std::string(dtype_name(p.dout_type())) + "; backward needs " +
           std::string(dtype_name(p.dtype)) + ", as q";
  const Geometry size = default_geometry(p);
  const std::string stride =
      bad_stride({{"dout", size.dout}, {"dq", size.dq}, {"dk", size.dk}, {"dv", size.dv}});
  return stride.empty() ? backward::limit(sized_arguments(p, size)) : stride;
}

uint64_t workspace(const Problem& p, const Geometry& size, Direction direction) {
  if (p.dtype != TEA_FP16 && p.dtype != TEA_BF16) return 0;
  const AttentionArguments args = sized_arguments(p, size);
  if (direction == Direction::kBackward)
    return backward::limit(args).empty() ? backward::workspace_bytes(args) : 0;
  const Selection selected = select_kernel(args);
  const bool counts = selected.tile >= 0 && needs_tile_counter(args, selected);
  return std::max(counts ? kCounterBytes : 0, p.training ? 0 : decode::workspace_bytes(args));
}

}  // namespace tea::hopper
