// The context-parallel helpers of the TransformerEngine C API, based on the operations of src/ops.
// Most handles are passed by reference.
#include "ops/context_parallel.h"

#include <string_view>

#include "nvte/boundary.h"
#include "nvte/operands.h"
#include "transformer_engine/fused_attn.h"

namespace tea::nvte {
namespace {

// [t, h, d] or [n, t, h, d].
struct Rows {
  int64_t slabs, tokens, elements;
};

Rows rows_of(const Operand& tensor) {
  require_rank(tensor, 3, 4);
  const int64_t slabs = tensor.rank() == 4 ? tensor.size(0) : 1;
  return {slabs, tensor.size(-3), tensor.size(-2) * tensor.size(-1)};
}

// Packed [h, length] or [b, h, length].
struct LseLines {
  int64_t heads, length;
};

LseLines lse_lines(const Operand& lse, bool packed, int64_t batch) {
  require_rank(lse, packed ? 2 : 3, packed ? 2 : 3);
  if (!packed)
    TEA_REQUIRE(lse.size(0) == batch, std::string(lse.name) + ".shape[0]", lse.size(0),
                "the batch of cu_seqlens, " + shown(batch));
  return {lse.size(-2), lse.size(-1)};
}

void require_length(const char* name, int64_t length, int64_t needed, bool exactly) {
  TEA_REQUIRE(exactly ? length == needed : length >= needed, name, length,
              shown(needed) + (exactly ? "" : " or more"));
}

// Checks a step's LSE: at least `needed` rows, and exactly that number if it is not packed.
void check_step_lse(const Operand& step, bool packed, const LseLines& whole, int64_t needed) {
  require_rank(step, packed ? 2 : 3, packed ? 2 : 3);
  TEA_REQUIRE(step.size(-2) == whole.heads, std::string(step.name) + ".shape[-2]", step.size(-2),
              "the heads of lse, " + shown(whole.heads));
  require_length((std::string(step.name) + ".shape[-1]").c_str(), step.size(-1), needed, !packed);
}

int32_t action_of(const char* name, const char* text) {
  constexpr std::string_view kActions[] = {"none", "add", "copy"};
  TEA_REQUIRE(text, name, text, "\"add\", \"copy\" or \"none\"");
  for (int32_t action = TEA_CP_NONE; action <= TEA_CP_COPY; ++action)
    if (text == kActions[action]) return action;
  refuse_argument(name, text, "\"add\", \"copy\" or \"none\"");
}

tea_cp_lse lse_arguments(const Operand& lse, const Operand& cu_seqlens, bool packed) {
  tea_cp_lse a{};
  a.batch = batch_of(cu_seqlens);
  a.packed = packed;
  a.cu_seqlens = int32_data(cu_seqlens, 2);
  const LseLines lines = lse_lines(lse, packed, a.batch);
  a.heads = lines.heads, a.lse_len = lines.length;
  a.lse = float_data(lse, 0);
  return a;
}

struct OutOperands {
  Operand out, step, lse, step_lse, cu_seqlens;
};

tea_cp_out out_arguments(const OutOperands& o, bool second, bool packed) {
  tea_cp_out a{};
  a.dtype = required_dtype(o.out, kRealDtypes);
  require_same_type(o.step, o.out);
  require_rank(o.out, 3, 3);
  a.only_second_half = second, a.packed = packed;
  a.tokens = o.out.size(0), a.heads = o.out.size(1), a.dim = o.out.size(2);
  const int64_t halves = second ? 2 : 1;
  require_elements(o.step, a.tokens / halves * a.heads * a.dim);
  a.batch = batch_of(o.cu_seqlens);
  a.cu_seqlens = int32_data(o.cu_seqlens, 2);
  const LseLines lines = lse_lines(o.lse, packed, a.batch);
  TEA_REQUIRE(lines.heads == a.heads, "lse.shape[-2]", lines.heads,
              "the heads of out, " + shown(a.heads));
  if (packed) require_length("lse.shape[-1]", lines.length, a.tokens, false);
  check_step_lse(o.step_lse, packed, lines, lines.length / halves);
  a.lse_len = lines.length, a.step_lse_len = o.step_lse.size(-1);
  a.out = o.out.data(), a.step_out = o.step.data();
  a.lse = float_data(o.lse, 0), a.step_lse = float_data(o.step_lse, 0);
  return a;
}

}  // namespace
}  // namespace tea::nvte

using tea::nvte::Operand;
using tea::nvte::place_of;

void nvte_cp_thd_read_half_tensor(const NVTETensor& tensor, const NVTETensor& cu_seqlens,
                                  NVTETensor half, int half_idx, cudaStream_t stream) {
  TEA_NVTE_EXPORTED({
    const Operand whole("tensor", tensor), lengths("cu_seqlens", cu_seqlens), part("half", half);
    const auto rows = tea::nvte::rows_of(whole);
    require_same_type(part, whole);
    require_elements(part, rows.slabs * (rows.tokens / 2) * rows.elements);
    TEA_REQUIRE(half_idx == 0 || half_idx == 1, "half_idx", half_idx, "0 or 1");
    tea_cp_half a{};
    a.second = half_idx;
    a.tensor = whole.data(), a.half = part.data();
    a.batch = batch_of(lengths), a.cu_seqlens = int32_data(lengths, 2);
    a.slabs = rows.slabs, a.tokens = rows.tokens;
    a.row_bytes = rows.elements * static_cast<int64_t>(tea::nvte::bytes_of(whole.type()));
    if (rows.slabs) tea::nvte::run(tea::cp_read_half, a, place_of({whole, lengths, part}, stream));
  });
}

void nvte_cp_thd_second_half_lse_correction(NVTETensor lse, const NVTETensor& lse_per_step,
                                            const NVTETensor& cu_seqlens, int lse_packed,
                                            cudaStream_t stream) {
  TEA_NVTE_EXPORTED({
    const Operand whole("lse", lse), step("lse_per_step", lse_per_step);
    const Operand lengths("cu_seqlens", cu_seqlens);
    tea_cp_lse a = tea::nvte::lse_arguments(whole, lengths, lse_packed != 0);
    tea::nvte::check_step_lse(step, lse_packed != 0, {a.heads, a.lse_len}, a.lse_len / 2);
    a.half_lse = float_data(step, 0), a.half_len = step.size(-1);
    tea::nvte::run(tea::cp_lse_correct, a, place_of({whole, step, lengths}, stream));
  });
}

void nvte_cp_thd_read_second_half_lse(const NVTETensor& lse, const NVTETensor& cu_seqlens,
                                      NVTETensor half_lse, int lse_packed,
                                      int second_half_lse_seqlen, cudaStream_t stream) {
  TEA_NVTE_EXPORTED({
    const Operand whole("lse", lse), lengths("cu_seqlens", cu_seqlens), part("half_lse", half_lse);
    const bool packed = lse_packed != 0;
    tea_cp_lse a = tea::nvte::lse_arguments(whole, lengths, packed);
    tea::nvte::require_length("second_half_lse_seqlen", second_half_lse_seqlen, a.lse_len / 2,
                              !packed);
    a.half_len = second_half_lse_seqlen;
    a.half_lse = float_data(part, (packed ? 1 : a.batch) * a.heads * a.half_len);
    tea::nvte::run(tea::cp_lse_read, a, place_of({whole, lengths, part}, stream));
  });
}

void nvte_cp_thd_out_correction(NVTETensor out, const NVTETensor& out_per_step,
                                const NVTETensor& lse, const NVTETensor& lse_per_step,
                                const NVTETensor& cu_seqlens, int only_second_half, int lse_packed,
                                cudaStream_t stream) {
  TEA_NVTE_EXPORTED({
    const tea::nvte::OutOperands o = {{"out", out},
                                      {"out_per_step", out_per_step},
                                      {"lse", lse},
                                      {"lse_per_step", lse_per_step},
                                      {"cu_seqlens", cu_seqlens}};
    tea::nvte::run(tea::cp_out_correct,
                   tea::nvte::out_arguments(o, only_second_half != 0, lse_packed != 0),
                   place_of({o.out, o.step, o.lse, o.step_lse, o.cu_seqlens}, stream));
  });
}

void nvte_cp_thd_grad_correction(NVTETensor grad, const NVTETensor& grad_per_step,
                                 const NVTETensor& cu_seqlens, const char* first_half,
                                 const char* second_half, cudaStream_t stream) {
  TEA_NVTE_EXPORTED({
    const Operand whole("grad", grad), step("grad_per_step", grad_per_step);
    const Operand lengths("cu_seqlens", cu_seqlens);
    const auto rows = tea::nvte::rows_of(whole);
    tea_cp_grad a{};
    a.dtype = required_dtype(whole, tea::kRealDtypes);
    require_same_type(step, whole);
    a.first = tea::nvte::action_of("first_half", first_half);
    a.second = tea::nvte::action_of("second_half", second_half);
    const bool half = a.first == TEA_CP_NONE || a.second == TEA_CP_NONE;
    require_elements(step, rows.slabs * (half ? rows.tokens / 2 : rows.tokens) * rows.elements);
    a.grad = whole.data(), a.step_grad = step.data();
    a.batch = batch_of(lengths), a.cu_seqlens = int32_data(lengths, 2);
    a.slabs = rows.slabs, a.tokens = rows.tokens, a.row_elements = rows.elements;
    if (rows.slabs)
      tea::nvte::run(tea::cp_grad_correct, a, place_of({whole, step, lengths}, stream));
  });
}

void nvte_cp_thd_get_partitioned_indices(const NVTETensor& cu_seqlens, NVTETensor output,
                                         int total_tokens, int world_size, int rank,
                                         cudaStream_t stream) {
  TEA_NVTE_EXPORTED({
    const Operand lengths("cu_seqlens", cu_seqlens), indices("output", output);
    TEA_REQUIRE(total_tokens > 0, "total_tokens", total_tokens, "1 or more");
    TEA_REQUIRE(world_size > 0, "world_size", world_size, "1 or more");
    tea_cp_partition a{};
    a.world = world_size, a.rank = rank;
    a.batch = batch_of(lengths), a.cu_seqlens = int32_data(lengths, 2);
    a.tokens = total_tokens;
    a.indices = int32_data(indices, total_tokens / world_size);
    tea::nvte::run(tea::cp_partition_indices, a, place_of({lengths, indices}, stream));
  });
}
