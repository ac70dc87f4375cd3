// The list of operators: one kernel each for CPU and CUDA.
#include <torch/csrc/stable/library.h>

#include "frontend/options.h"
#include "torch/ops.h"

namespace tea::torch_ops {
namespace {

// An operator in the form in which PyTorch calls it.
template <Operator* run>
void kernel(StableIValue* values, uint64_t inputs, uint64_t) {
  Stack stack(values, inputs);
  run(stack);
}

struct OperatorEntry {
  const char* name;
  decltype(&kernel<forward>) kernel;
};
#define ROW(name) \
  { #name, kernel < name> }
constexpr OperatorEntry kOperators[] = {
    {"attention", kernel<forward>},  // the same; its gradient is registered in Python
    ROW(forward),
    ROW(forward_minimal),
    ROW(inference),
    ROW(inference_plain),
    ROW(backward),
    ROW(backward_minimal),
    ROW(backward_out),
    ROW(backward_minimal_out),
    ROW(fp8_forward),
    ROW(fp8_forward_amax),
    ROW(fp8_backward),
    ROW(fp8_backward_out),
    ROW(fp8_attention_forward),
    ROW(fp8_attention_backward),
    // the same with fewer arguments
    {"fp8_attention_forward_minimal", kernel<fp8_attention_forward>},
    {"fp8_attention_backward_minimal", kernel<fp8_attention_backward>},
    ROW(part_forward),
    ROW(record_part_forward),
    ROW(record_part_backward),
    ROW(replay),
    ROW(part_backward),
    ROW(fp8_part_forward),
    ROW(fp8_part_backward),
    ROW(explain),
    ROW(kv_cache_append),
    ROW(thd_to_bshd),
    ROW(bshd_to_thd),
    ROW(cu_seqlens_from_lengths),
    ROW(cu_seqlens_from_mask),
    ROW(rng_fill),
    ROW(rng_fill_captured),
    ROW(rng_advance),
    ROW(dropout_mask),
    ROW(merge),
    ROW(merge_into),
    ROW(round_o),
    ROW(cp_read_half),
    ROW(cp_lse_correct),
    ROW(cp_lse_read),
    ROW(cp_out_correct),
    ROW(cp_grad_correct),
    ROW(cp_partition_indices),
    ROW(cp_to_rank_order),
    ROW(cp_to_sequence_order),
    ROW(cp_copy_valid),
    ROW(scaled_softmax_forward),
    ROW(scaled_softmax_backward),
    ROW(flash_prepare_forward),
    ROW(flash_prepare_backward),
    ROW(fp8_quantize),
    ROW(fp8_quantize_joint),
    ROW(fp8_quantize_current),
    ROW(fp8_quantize_joint_current),
    ROW(fp8_dequantize),
    ROW(fp8_scale),
    ROW(fp8_update_scales),
    ROW(amax),
    ROW(fill),
    ROW(fill_bytes),
};
#undef ROW

void implement(torch::stable::detail::StableLibrary& library) {
  for (const OperatorEntry& entry : kOperators) library.impl(entry.name, entry.kernel);
}

}  // namespace

// The kernels read the device from the tensors, so both keys have the same kernels.
STABLE_TORCH_LIBRARY_IMPL(te_attention, CPU, library) { implement(library); }
STABLE_TORCH_LIBRARY_IMPL(te_attention, CUDA, library) { implement(library); }

// PyTorch's own operator, which has no other kernel on these devices (attention.cpp).
void implement_fused(torch::stable::detail::StableLibrary& library) {
  library.impl("_scaled_dot_product_fused_attention_overrideable", kernel<fused_forward>);
  library.impl("_scaled_dot_product_fused_attention_overrideable_backward", kernel<fused_backward>);
}
STABLE_TORCH_LIBRARY_IMPL(aten, CPU, library) { implement_fused(library); }
STABLE_TORCH_LIBRARY_IMPL(aten, CUDA, library) { implement_fused(library); }

}  // namespace tea::torch_ops

// The options of attention as a schema, from which the Python package derives its own tables.
extern "C" __attribute__((visibility("default"))) const char* te_attention_torch_options() {
  return tea::frontend::schema().c_str();
}
