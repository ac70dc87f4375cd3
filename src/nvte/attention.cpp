// Every tensor of the call is entered into tea_run. The tensors that the problem does not use,
// which TransformerEngine's callers may pass nevertheless, are then removed with the table of
// tensors.
#include "nvte/attention.h"

#include <algorithm>
#include <array>
#include <bit>

#include "core/error.h"
#include "core/plan.h"
#include "nvte/aux_tensors.h"
#include "nvte/layout.h"
#include "nvte/memory.h"
#include "nvte/problem.h"

namespace tea::nvte {
namespace {

using Tensors = std::array<void*, TEA_TENSOR_COUNT>;

constexpr uint64_t kWorkspaceAlignment =
    256;  // the engines' requirement; callers guarantee only 16
constexpr uintptr_t kAlignment = 16;

uint64_t rounded_up(uint64_t bytes) {
  return (bytes + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
}

struct WorkspaceNeed {
  uint64_t engine = 0;
  uint64_t lse = 0;  // training needs an LSE even if the pack has the maxima instead
  uint64_t total() const {
    const uint64_t bytes = rounded_up(engine) + lse;
    return bytes ? bytes + kWorkspaceAlignment : 0;
  }
};

WorkspaceNeed workspace_need(const Problem& problem, const tea_run& run, const Work& work,
                             Direction direction) {
  const Geometry size = geometry(problem, &run);
  WorkspaceNeed need;
  need.engine = planner().workspace_bound(problem, size, direction);
  if (direction == Direction::kForward && work.options.training && work.options.max_logit)
    need.lse =
        static_cast<uint64_t>(tensor_info(TEA_LSE).shape(problem, size).elements()) * sizeof(float);
  return need;
}

void set_workspace_shape(Tensor& workspace, uint64_t bytes) {
  workspace.data.dtype = kNVTEByte;
  workspace.data.shape = {{std::max<uint64_t>(bytes, 1)}, 1};
}

// Sets the aligned workspace and the stream. The workspace's shape is [1] after a run, so this
// shape is accepted from a caller that reuses the handle; any other shape must be large enough.
char* set_workspace(tea_run& run, const Call& call, const WorkspaceNeed& need) {
  const NVTEBasicTensor& given = call.workspace->data;
  const uint64_t bytes = numel(given.shape) * bits_of(given.dtype) / 8;
  TEA_REQUIRE(bytes >= need.total() || bytes == 1, "workspace", shown(bytes) + " bytes",
              "at least " + shown(need.total()));
  const auto address = reinterpret_cast<uintptr_t>(given.data_ptr);
  char* const aligned = static_cast<char*>(given.data_ptr) + (rounded_up(address) - address);
  run.workspace = aligned;
  run.workspace_bytes = need.engine;
  run.stream = call.stream;
  return aligned;
}

void set_common(Tensors& t, const Call& call, const Work& work) {
  const Layout& layout = layout_of(work.options.layout);
  t[TEA_Q] = call.q->data.data_ptr;
  t[TEA_K] = call.k->data.data_ptr;
  t[TEA_V] = call.v->data.data_ptr;
  t[TEA_Q_SCALE_INV] = call.q->scale_inv.data_ptr;
  t[TEA_K_SCALE_INV] = call.k->scale_inv.data_ptr;
  t[TEA_V_SCALE_INV] = call.v->scale_inv.data_ptr;
  t[TEA_S_SCALE] = call.s->scale.data_ptr;
  t[TEA_S_SCALE_INV] = call.s->scale_inv.data_ptr;
  t[TEA_CU_SEQLENS_Q] = call.cu_seqlens_q->data.data_ptr;
  t[TEA_CU_SEQLENS_KV] = call.cu_seqlens_kv->data.data_ptr;
  void* const starts_q = call.cu_seqlens_q_padded->data.data_ptr;
  void* const starts_kv = call.cu_seqlens_kv_padded->data.data_ptr;
  // Without offsets, a side's sequences start at its cumulative lengths. One buffer has one set of
  // offsets.
  t[TEA_OFFSETS_Q] = starts_q ? starts_q : t[TEA_CU_SEQLENS_Q];
  t[TEA_OFFSETS_KV] = starts_kv ? starts_kv : t[TEA_CU_SEQLENS_KV];
  if (layout.packing_q().tensors > 1) t[TEA_OFFSETS_KV] = t[TEA_OFFSETS_Q];
}

void take_out_unused(Tensors& t, const Problem& problem, Direction direction) {
  for (const TensorInfo& info : tensor_table())
    if (info.use(problem, direction) == Use::kUnused) t[info.index] = nullptr;
}

int common_alignment(const Tensors& t, const Problem& problem) {
  uintptr_t bits = kAlignment;
  for (const TensorInfo& info : tensor_table()) {
    if (info.type > Type::kBias) continue;
    const auto address = reinterpret_cast<uintptr_t>(t[info.index]);
    const auto element = static_cast<uintptr_t>(info.element_bytes(problem));
    TEA_REQUIRE(address % element == 0, "the address of " + std::string(info.name),
                "a multiple of " + shown(address & -address) + " bytes only",
                "a multiple of " + shown(element) + ", the size of an element");
    bits |= address;
  }
  return 1 << std::countr_zero(bits);
}

// The device of the call's memory, which must be the same for all. Empty tensors have no memory.
int place_of(const Tensors& t, const tea_run& run) {
  MemorySide side;
  for (const TensorInfo& info : tensor_table()) side.add(info.name, t[info.index]);
  side.add("workspace", run.workspace_bytes ? run.workspace : nullptr);
  return side.device();
}

// Lengths and pages are validated when the run reads them; invalid values have been clamped.
void require_valid(int32_t status) {
  TEA_REQUIRE(!(status & TEA_STATUS_BAD_LENGTHS), "cu_seqlens_q or cu_seqlens_kv",
              "out of range in part",
              "lengths from 0 to max_seqlen, of sequences inside the tensors");
  TEA_REQUIRE(!(status & TEA_STATUS_BAD_PAGE), "page_table_k or page_table_v",
              "out of range in part", "numbers of pages that there are");
}

// Plans and runs. `run` has the sizes, the workspace and the stream; `t` all tensors of the call.
void execute(Problem problem, tea_run run, Tensors& t, Direction direction) {
  take_out_unused(t, problem, direction);
  problem.alignment = common_alignment(t, problem);
  const int device = place_of(t, run);
  const PlanRef plan = planner().plan(problem, device);
  // Only on the host: on a GPU reading the status would synchronise.
  int32_t status = 0;
  if (device == kHost) run.status = &status;
  run.tensors = t.data();
  run.tensor_count = static_cast<uint32_t>(t.size());
  if (direction == Direction::kForward)
    tea::forward(*plan, &run);
  else
    tea::backward(*plan, &run);
  require_valid(status);
}

void set_forward(Tensors& t, const ForwardCall& call) {
  t[TEA_O] = call.o->data.data_ptr;
  t[TEA_BIAS] = call.bias->data.data_ptr;
  t[TEA_SINK] = call.softmax_offset->data.data_ptr;
  t[TEA_TABLE_K] = call.table_k->data.data_ptr;
  t[TEA_TABLE_V] = call.table_v->data.data_ptr;
  t[TEA_RNG_STATE] = call.rng_state->data.data_ptr;
  t[TEA_S_AMAX] = call.s->amax.data_ptr;
  t[TEA_O_SCALE] = call.o->scale.data_ptr;
  t[TEA_O_AMAX] = call.o->amax.data_ptr;
}

// The outputs in the pack, or in the workspace if the pack has no entry for them.
void set_forward_aux(Tensors& t, const ForwardCall& call, const std::vector<AuxEntry>& entries,
                     char* workspace_lse) {
  t[TEA_LSE] = aux_data(*call.aux, entries, Aux::kLse);
  t[TEA_MAX] = aux_data(*call.aux, entries, Aux::kMax);
  t[TEA_SUM_EXP] = aux_data(*call.aux, entries, Aux::kSumExp);
  if (void* const opaque = aux_data(*call.aux, entries, Aux::kOpaque)) t[TEA_LSE] = opaque;
  if (!t[TEA_LSE]) t[TEA_LSE] = workspace_lse;
}

// The pack of NVTE_F16_max512_seqlen has no rng_state: backward reads a copy after the LSE.
void keep_rng_state(const ForwardCall& call, const std::vector<AuxEntry>& entries,
                    const Work& work) {
  void* const kept = opaque_rng_state(aux_data(*call.aux, entries, Aux::kOpaque), work.sizes);
  const bool drops = work.options.training && work.options.dropout != 0;
  if (!kept || !drops || work.sizes.batch == 0) return;
  constexpr size_t kBytes = 2 * sizeof(int64_t);
  copy(kept, call.rng_state->data.data_ptr, kBytes, call.stream);
}

void set_backward(Tensors& t, const BackwardCall& call) {
  const struct {
    tea_tensor index;
    void* data;
  } rows[] = {
      {TEA_O, call.o->data.data_ptr},
      {TEA_DOUT, call.dout->data.data_ptr},
      {TEA_LSE, call.aux.lse},
      {TEA_RNG_STATE, call.aux.rng_state},
      {TEA_BIAS, call.aux.bias},
      {TEA_SINK, call.aux.softmax_offset},
      {TEA_DQ, call.dq->data.data_ptr},
      {TEA_DK, call.dk->data.data_ptr},
      {TEA_DV, call.dv->data.data_ptr},
      {TEA_DBIAS, call.dbias->data.data_ptr},
      {TEA_DSINK, call.dsoftmax_offset->data.data_ptr},
      {TEA_O_SCALE_INV, call.o->scale_inv.data_ptr},
      {TEA_DOUT_SCALE_INV, call.dout->scale_inv.data_ptr},
      {TEA_DP_SCALE, call.dp->scale.data_ptr},
      {TEA_DP_SCALE_INV, call.dp->scale_inv.data_ptr},
      {TEA_DP_AMAX, call.dp->amax.data_ptr},
      {TEA_DQ_SCALE, call.dq->scale.data_ptr},
      {TEA_DK_SCALE, call.dk->scale.data_ptr},
      {TEA_DV_SCALE, call.dv->scale.data_ptr},
      {TEA_DQ_AMAX, call.dq->amax.data_ptr},
      {TEA_DK_AMAX, call.dk->amax.data_ptr},
      {TEA_DV_AMAX, call.dv->amax.data_ptr},
  };
  for (const auto& row : rows) t[row.index] = row.data;
}

}  // namespace

void forward(const ForwardCall& call, const Work& work, NVTE_Fused_Attn_Backend backend) {
  const std::vector<AuxEntry> entries = aux_entries(work, backend);
  if (call.aux->size == 0) {
    describe_aux(*call.aux, entries);
  } else {
    check_aux_size(*call.aux, entries, backend);
    point_aux_at_inputs(*call.aux, entries, call);
  }
  const Problem problem = problem_of(work);
  tea_run run = run_of(work);
  const WorkspaceNeed need = workspace_need(problem, run, work, Direction::kForward);
  if (!call.workspace->data.data_ptr) return set_workspace_shape(*call.workspace, need.total());

  char* const workspace = set_workspace(run, call, need);
  Tensors t{};
  set_common(t, call, work);
  set_forward(t, call);
  set_forward_aux(t, call, entries, need.lse ? workspace + rounded_up(need.engine) : nullptr);
  execute(problem, run, t, Direction::kForward);
  keep_rng_state(call, entries, work);
  set_workspace_shape(*call.workspace, 1);
}

void backward(const BackwardCall& call, const Work& work) {
  const Problem problem = problem_of(work);
  tea_run run = run_of(work);
  const WorkspaceNeed need = workspace_need(problem, run, work, Direction::kBackward);
  if (!call.workspace->data.data_ptr) return set_workspace_shape(*call.workspace, need.total());

  set_workspace(run, call, need);
  Tensors t{};
  set_common(t, call, work);
  set_backward(t, call);
  execute(problem, run, t, Direction::kBackward);
  set_workspace_shape(*call.workspace, 1);
}

}  // namespace tea::nvte
