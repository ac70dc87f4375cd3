// Translates Problem and Run to a graph and its pointers, and refuses what cuDNN does not support.
#include "cudnn/engine.h"

#include <algorithm>
#include <vector>

#include "core/driver.h"
#include "core/error.h"
#include "cudnn/errata.h"
#include "cudnn/faster.h"
#include "cudnn/graphs.h"
#include "cudnn/library.h"
#include "cudnn/work.h"

namespace tea::cudnn {
namespace {

constexpr size_t kLeastVersion = 90800;
constexpr int kLeastSm = 80, kLeastFp8Sm = 90;
constexpr int64_t kMostRows = int64_t{1} << 30;  // cuDNN's bounds are ints

void check_origin(const Problem& p, const Run& run) {
  if (takes_origin(p, run)) return;
  if (run.shift)
    throw Error(TEA_UNSUPPORTED, "run.shift is " + shown(run.shift) + "; cudnn needs 0");
  const std::string with = p.drops() ? " with dropout" : " with a mask";
  if (run.origin_device)
    throw Error(TEA_UNSUPPORTED, "run.origin_device is a pointer; cudnn needs NULL" + with);
  throw Error(TEA_UNSUPPORTED, "run.origin is " + shown(run.origin[0]) + "," +
                                   shown(run.origin[1]) + "," + shown(run.origin[2]) + "," +
                                   shown(run.origin[3]) + "; cudnn needs " +
                                   (p.drops() ? "zeros" : "row and column equal") + with);
}

struct Cudnn final : Executable {
  Problem problem;
  Device device;
  Passes passes;
  bool exact_s_amax = false;  // instead of the largest P after the division
  mutable Graphs graphs;

  Cudnn(const Problem& p, const Device& d, Passes a) : problem(p), device(d), passes(a) {}

  void forward(const Run& run) const override { go(run, Direction::kForward); }
  void backward(const Run& run) const override { go(run, Direction::kBackward); }

  // The graph, or the reason of a refusal.
  std::variant<Refusal, std::shared_ptr<const Graph>> make(const Geometry& size,
                                                           const GraphKey& key) const {
    TEA_REFUSE_IF(
        key.capacity.batch > kMostSequences,
        "the batch is " + shown(key.capacity.batch) + "; needs at most " + shown(kMostSequences));
    const driver::OnDevice here(device.index);
    const driver::OutsideCapture loads;  // a plan may be made while its run is being captured
    auto made = build(problem, size, key, device);
    const auto* graph = std::get_if<std::shared_ptr<const Graph>>(&made);
    if (!graph) return made;
    const uint64_t bound = library_bound(problem, size, key.capacity, key.direction, passes);
    TEA_REFUSE_IF((*graph)->workspace() > bound,
                  "cuDNN wants a workspace of " + shown((*graph)->workspace()) +
                      " bytes; needs at most " + shown(bound) + ", linear in the lengths");
    return graphs.insert(key, *graph);
  }

 private:
  // The context of the device is current.
  std::shared_ptr<const Graph> graph_of(const Run& run, const GraphKey& key) const {
    if (auto known = graphs.find(key)) return known;
    if (driver::is_capturing(run.stream))
      throw Error(TEA_UNSUPPORTED,
                  "cudnn has no graph for these sizes yet and cannot build one while a CUDA graph "
                  "is being captured; run the plan once before");
    auto made = make(run.size, key);
    if (const auto* refusal = std::get_if<Refusal>(&made))
      throw Error(TEA_UNSUPPORTED, "cudnn: " + refusal->why);
    return std::get<1>(made);
  }

  // Of sizes that only runs know: a refusal comes before forward has run, not after it.
  void build_backward(const Run& run, const Capacity& capacity) const {
    for (const GraphKey& key : graphs_of(problem, capacity, Passes::kBackward)) graph_of(run, key);
  }

  void go(const Run& run, Direction d) const {
    check_origin(problem, run);
    const bool back = d == Direction::kBackward, empty = is_empty(problem, run.size);
    const GraphKey key{capacity_of(problem, run.size), d, back && run.tensor[TEA_DBIAS],
                       back && run.tensor[TEA_DSINK]};
    const driver::OnDevice here(device.index);
    const auto graph = empty ? nullptr : graph_of(run, key);
    if (graph && !back && problem.varies()) build_backward(run, key.capacity);
    const Layout at = layout(problem, run.size, key.capacity, d);
    const Pointers slots = pointers(run, at);
    if (const auto before = preparation(problem, run, key.capacity, slots, d))
      prepare(*before, run.stream);
    if (graph) graph->run(slots, static_cast<char*>(run.workspace) + at.library, run.stream);
    if (graph && !back)
      if (const auto rows = finishing(problem, run, slots)) finish(*rows, run.stream);
    if (graph && problem.is_fp8())
      if (const auto amaxes = raising(run, slots, d, exact_s_amax)) raise(*amaxes, run.stream);
    if (empty && key.dsink)
      driver::fill(run.tensor[TEA_DSINK], 0, sizeof(float) * static_cast<size_t>(problem.heads_q),
                   run.stream);
    if (!empty && !leaves_rows(problem)) return;
    const Clear keys = back ? clearing_of_keys(problem, run) : Clear{};
    clear(clearing(problem, run, slots, d), back ? &keys : nullptr, run.stream);
  }
};

// ----------------------------------------------------------------------------------------- plan

// The first stride that cuDNN's copies cannot take, as text; empty: all are fine.
std::string bad_stride(const Problem& p) {
  const Geometry size = default_geometry(p);
  struct NamedStrides {
    const char* name;
    const tea_strides& s;
    int32_t dtype;
  };
  const int32_t type = p.dtype, dtype = p.dqkv_type();
  const NamedStrides forward[] = {
      {"q", size.q, type}, {"k", size.k, type}, {"v", size.v, type}, {"o", size.o, p.o_type()}};
  const NamedStrides backward[] = {{"dout", size.dout, p.dout_type()},
                                   {"dq", size.dq, dtype},
                                   {"dk", size.dk, dtype},
                                   {"dv", size.dv, dtype}};
  const auto bad = [](std::span<const NamedStrides> tensors) -> std::string {
    for (const NamedStrides& tensor : tensors)
      for (const int64_t stride : {tensor.s.batch, tensor.s.seq, tensor.s.head})
        if (const int64_t step = is_fp8(tensor.dtype) ? 16 : 8; stride % step)
          return "a stride of " + std::string(tensor.name) + " is " + shown(stride) +
                 "; needs a multiple of " + shown(step);
    return "";
  };
  const std::string first = bad(forward);
  return first.empty() && p.training ? bad(backward) : first;
}

// Sizes that the problem itself gives leave nothing to do.
bool fixed_and_empty(const Problem& p) {
  return (!p.varies() && !p.batch) || (!p.varies_q() && !p.seqlen_q) ||
         (!p.varies_kv() && !p.seqlen_kv);
}

// In ragged backward passes cuDNN takes gradients to lie as what they are the gradients of.
std::string ragged_limit(const Problem& p) {
  if (!p.training || !p.varies()) return "";
  const Geometry g = default_geometry(p);
  const auto same = [](const tea_strides& a, const tea_strides& b) {
    return a.seq == b.seq && a.head == b.head;
  };
  // Of shared heads it keeps the gradients of each query head as far apart as those of the heads,
  // in rows as long as those times a group: they must not reach the next row. (One head may lie
  // anywhere: graph.cpp.)
  const auto reach = [&](const tea_strides& s, int64_t dim) {
    return s.head * (p.heads_q - 1) + dim > s.seq * (p.heads_q / p.heads_kv);
  };
  const bool shared = p.heads_q > p.heads_kv && p.heads_kv > 1 && p.kv_form == TEA_RAGGED;
  if (shared && (reach(g.dk, p.dim_qk) || reach(g.dv, p.v_dim())))
    return "heads of dk or dv lie apart; a ragged backward pass needs shared heads side by side";
  if (same(g.dq, g.q) && same(g.dk, g.k) && same(g.dv, g.v) && same(g.dout, g.o)) return "";
  return "strides of dq, dk, dv or dout differ from those of q, k, v or o; a ragged backward pass "
         "needs the same";
}

// Problems that cuDNN accepts, but computes wrongly or writes outside the tensor for.
std::string bias_limit(const Problem& p) {
  if (!p.bias) return "";
  if (fixed_and_empty(p)) return "a size is 0; needs at least 1 with a bias";
  if (p.varies()) return "a form is ragged or paged; a bias needs sizes that the problem gives";
  if (p.bias_broadcast & (TEA_BROADCAST_ROW | TEA_BROADCAST_COL))
    return "bias_broadcast has a row or column; needs batch and head only";
  if (p.training && p.bias_broadcast)
    return "bias_broadcast is not 0; training needs 0: cuDNN rounds each term of the sum";
  if (p.training && !is_dense(p))
    return "a form is not dense; a gradient of the bias needs both dense";
  return "";
}

// Options that its graphs of fp8 do not support.
std::string fp8_limit(const Problem& p, const Device& device) {
  if (!p.is_fp8()) return "";
  if (device.sm < kLeastFp8Sm)
    return "device is sm_" + shown(device.sm) + "; fp8 needs sm_" + shown(kLeastFp8Sm) +
           " or later";
  if (p.bias || p.alibi) return "it has a bias or ALiBi; fp8 needs none";
  if (p.drops()) return "dropout is " + shown(p.dropout) + "; fp8 needs 0";
  if (p.varies()) return "a form is ragged or paged; fp8 needs dense or padded";
  if (p.v_dim() != p.dim_qk)
    return "dim_v is " + shown(p.v_dim()) + "; fp8 needs that of dim_qk, " + shown(p.dim_qk);
  return "";
}

std::string why_not(const Problem& p, const Device& device) {
  if (device.is_host()) return "device is the host; it runs on a GPU";
  if (device.sm < kLeastSm)
    return "device is sm_" + shown(device.sm) + "; needs sm_" + shown(kLeastSm) + " or later";
  const std::string fp8 = fp8_limit(p, device);
  if (!fp8.empty()) return fp8;
  if (p.alignment && p.alignment < 16)
    return "alignment is " + shown(p.alignment) + "; needs 16 or more";
  if (p.scale_value() <= 0) return "scale is " + shown(p.scale) + "; needs more than 0";
  if (!p.is_fp8() && p.o_type() != p.dtype)
    return "o_dtype is " + std::string(dtype_name(p.o_type())) + "; needs that of q";
  if (!p.is_fp8() && p.training && (p.dout_type() != p.dtype || p.dqkv_type() != p.dtype))
    return "dout_dtype or dqkv_dtype is another than that of q; needs the same";
  const std::string bias = bias_limit(p);
  if (!bias.empty()) return bias;
  const std::string ragged = ragged_limit(p);
  if (!ragged.empty()) return ragged;
  if (p.window_left > kMostRows || p.window_right > kMostRows)
    return "a window is " + shown(std::max(p.window_left, p.window_right) - 1) +
           "; needs less than " + shown(kMostRows);
  if (p.softmax && p.outputs & ~TEA_OUTPUT_LSE)
    return "outputs are max or sum_exp with a sink; cuDNN counts the sink among the logits";
  return bad_stride(p);
}

}  // namespace

bool takes_origin(const Problem& p, const Run& run) {
  if (run.shift) return false;
  if (p.drops()) return !run.origin_device && std::ranges::count(run.origin, 0) == 4;
  if (!p.causal && !p.window_left && !p.window_right) return true;
  return !run.origin_device && run.origin[2] == run.origin[3];
}

namespace {

// After why_not(), which needs no library.
Attempt plan_by(const Library& found, const Problem& p, const Device& device, Passes passes,
                bool exact_s_amax) {
  TEA_REFUSE_IF(!found.symbols, "cuDNN was not found: " + found.why_none);
  TEA_REFUSE_IF(found.version < kLeastVersion, "cuDNN is " + shown(found.version) + "; needs " +
                                                   shown(kLeastVersion) + " or later");
  const Erratum* known = erratum(p, found.version, device.sm);
  TEA_REFUSE_IF(known,
                std::string("a known error of cuDNN: ") + known->what + " (" + known->link + ")");

  auto ready = std::make_unique<Cudnn>(p, device, passes);
  ready->exact_s_amax = exact_s_amax;
  if (fixed_and_empty(p)) return ready;
  for (const GraphKey& key : graphs_of(p, example_of(p), passes)) {
    const auto made = ready->make(default_geometry(p), key);
    if (const auto* refusal = std::get_if<Refusal>(&made))
      return Refusal{(key.direction == Direction::kForward ? "forward: " : "backward: ") +
                     refusal->why};
  }
  return ready;
}

constexpr Known kKnown[] = {
    {"dtype", 1u << TEA_FP16 | 1u << TEA_BF16 | 1u << TEA_E4M3 | 1u << TEA_E5M2},
    {"o_dtype"},
    {"dout_dtype"},
    {"dqkv_dtype"},
    {"bias_dtype", 1u << TEA_FP32},
    {"training", below(2)},
    {"deterministic", below(2)},
    {"outputs", below(3)},
    {"q_form", below(3)},
    {"kv_form", below(4)},
    {"gaps", below(2)},
    {"causal", below(2)},
    {"bottom_right", below(2)},
    {"window_left"},
    {"window_right"},
    {"bias", 1u << TEA_BIAS_NONE | 1u << TEA_BIAS_POST_SCALE},
    {"bias_broadcast", below(4)},
    {"alibi", 1u << TEA_ALIBI_NONE | 1u << TEA_ALIBI_STANDARD},
    {"softmax", below(3)},
    {"dropout"},
    {"scale"},
    {"has_scale", below(2)},
};

}  // namespace

std::span<const Known> known_fields() { return kKnown; }

Attempt plan(const Problem& p, const Device& device) { return plan_with(library(), p, device); }

Attempt plan_with(const Library& found, const Problem& p, const Device& device) {
  const std::string why = why_not(p, device);
  TEA_REFUSE_IF(!why.empty(), why);
  return plan_by(found, p, device, Passes::kBoth, false);
}

namespace {

// A plan where a row of a table of measurements applies. what: of cuDNN, in messages.
Attempt plan_faster(const char* what, std::span<const Faster> rows, const Problem& p,
                    const Device& device, Passes passes, bool exact_s_amax) {
  TEA_REFUSE_IF(!has_row(p, rows), "dim_qk is " + shown(p.dim_qk) + ", dim_v " + shown(p.v_dim()) +
                                       ", seqlen_q " + shown(p.seqlen_q) + ", batch " +
                                       shown(p.batch) + " and heads_q " + shown(p.heads_q) + "; " +
                                       what + " was not measured to be faster there");
  const std::string why = why_not(p, device);
  TEA_REFUSE_IF(!why.empty(), why);
  const Library found = library();
  TEA_REFUSE_IF(found.symbols && !has_row(p, device.sm, found.version, rows),
                "cuDNN " + shown(found.version) + " on sm_" + shown(device.sm) +
                    " was not measured to be faster");
  return plan_by(found, p, device, passes, exact_s_amax);
}

}  // namespace

Attempt plan_backward(const Problem& p, const Device& device) {
  TEA_REFUSE_IF(
      !is_plain(p),
      "it has options, or seqlen_q differs from seqlen_kv, or fp16 heads share keys; needs "
      "dense self-attention that trains");
  return plan_faster("cuDNN's backward pass", kFaster, p, device, Passes::kBackward, false);
}

Attempt plan_fp8(const Problem& p, const Device& device) {
  TEA_REFUSE_IF(!p.is_fp8(),
                "dtype is " + std::string(dtype_name(p.dtype)) + "; needs e4m3 or e5m2");
  TEA_REFUSE_IF(!is_plain_fp8(p),
                "it has options, or seqlen_q differs from seqlen_kv; needs dense self-attention");
  return plan_faster("cuDNN", fp8_rows(p), p, device, Passes::kBoth, true);
}

namespace {
uint64_t workspace_of(const Problem& p, const Geometry& size, Direction d, Passes passes) {
  const Capacity n = capacity_of(p, size);
  return layout(p, size, n, d).library + library_bound(p, size, n, d, passes);
}
}  // namespace

uint64_t workspace(const Problem& p, const Geometry& size, Direction d) {
  return workspace_of(p, size, d, Passes::kBoth);
}

uint64_t fp8_workspace(const Problem& p, const Geometry& size, Direction d) {
  if (!is_plain_fp8(p) || !has_row(p, fp8_rows(p))) return 0;
  return workspace_of(p, size, d, Passes::kBoth);
}

uint64_t backward_workspace(const Problem& p, const Geometry& size) {
  if (!is_plain(p) || !has_row(p)) return 0;
  return workspace_of(p, size, Direction::kBackward, Passes::kBackward);
}

}  // namespace tea::cudnn
