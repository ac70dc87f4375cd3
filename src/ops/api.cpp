// The C API of te_attention_ops.h: thin wrappers of the operations.
#include "core/boundary.h"
#include "core/growth.h"
#include "ops/context_parallel.h"
#include "ops/cu_seqlens.h"
#include "ops/dropout_mask.h"
#include "ops/fill.h"
#include "ops/flash_prepare.h"
#include "ops/fp8_cast.h"
#include "ops/kv_cache.h"
#include "ops/merge.h"
#include "ops/rng.h"
#include "ops/softmax.h"
#include "ops/thd.h"

// name: the C function; struct_name: its argument's type; operation: the C++ function.
#define TEA_OPERATION(name, struct_name, operation)                                                \
  tea_status name(const struct_name* args, int device, void* stream) {                             \
    return tea::guarded([&] {                                                                      \
      tea::operation(tea::as_known(args, {"args", #struct_name, #struct_name}), {device, stream}); \
    });                                                                                            \
  }

extern "C" {

TEA_OPERATION(tea_kv_cache_append, tea_kv_append, append_kv)
TEA_OPERATION(tea_thd_to_bshd, tea_thd_convert, thd_to_bshd)
TEA_OPERATION(tea_bshd_to_thd, tea_thd_convert, bshd_to_thd)
TEA_OPERATION(tea_cu_seqlens_fill, tea_cu_seqlens, fill_cu_seqlens)
TEA_OPERATION(tea_dropout_keep, tea_dropout_mask, dropout_keep)
TEA_OPERATION(tea_merge_parts, tea_merge, merge_parts)
TEA_OPERATION(tea_cp_read_half, tea_cp_half, cp_read_half)
TEA_OPERATION(tea_cp_lse_correct, tea_cp_lse, cp_lse_correct)
TEA_OPERATION(tea_cp_lse_read, tea_cp_lse, cp_lse_read)
TEA_OPERATION(tea_cp_out_correct, tea_cp_out, cp_out_correct)
TEA_OPERATION(tea_cp_grad_correct, tea_cp_grad, cp_grad_correct)
TEA_OPERATION(tea_cp_partition_indices, tea_cp_partition, cp_partition_indices)
TEA_OPERATION(tea_cp_to_rank_order, tea_cp_order, cp_to_rank_order)
TEA_OPERATION(tea_cp_to_sequence_order, tea_cp_order, cp_to_sequence_order)
TEA_OPERATION(tea_cp_copy_valid, tea_cp_valid, cp_copy_valid)
TEA_OPERATION(tea_flash_prepare_forward, tea_flash_prepare, flash_prepare_forward)
TEA_OPERATION(tea_flash_prepare_backward, tea_flash_prepare, flash_prepare_backward)
TEA_OPERATION(tea_scaled_softmax_forward, tea_scaled_softmax, scaled_softmax_forward)
TEA_OPERATION(tea_scaled_softmax_backward, tea_scaled_softmax, scaled_softmax_backward)
TEA_OPERATION(tea_fp8_quantize, tea_fp8_cast, fp8_quantize)
TEA_OPERATION(tea_fp8_quantize_current, tea_fp8_cast, fp8_quantize_current)
TEA_OPERATION(tea_fp8_dequantize, tea_fp8_cast, fp8_dequantize)
TEA_OPERATION(tea_fp8_quantize_joint, tea_fp8_joint_cast, fp8_quantize_joint)
TEA_OPERATION(tea_fp8_quantize_joint_current, tea_fp8_joint_cast, fp8_quantize_joint_current)
TEA_OPERATION(tea_fp8_dequantize_joint, tea_fp8_joint_cast, fp8_dequantize_joint)
TEA_OPERATION(tea_fp8_update_scales, tea_fp8_scales, fp8_update_scales)

tea_status tea_rng_fill(int64_t* rng_state, uint64_t seed, uint64_t offset, int device,
                        void* stream) {
  return tea::guarded([&] { tea::fill_rng(rng_state, seed, offset, {device, stream}); });
}

tea_status tea_rng_fill_captured(int64_t* rng_state, const int64_t* seed, const int64_t* offset,
                                 uint64_t offset_in_graph, int device, void* stream) {
  return tea::guarded([&] {
    tea::fill_rng_captured(rng_state, {seed, offset, offset_in_graph}, {device, stream});
  });
}

tea_status tea_rng_advance(int64_t* rng_state, uint64_t increment, int device, void* stream) {
  return tea::guarded([&] { tea::advance_rng(rng_state, increment, {device, stream}); });
}

tea_status tea_fill_bytes(void* data, int value, uint64_t bytes, int device, void* stream) {
  return tea::guarded([&] { tea::fill_bytes(data, value, bytes, {device, stream}); });
}

tea_status tea_fill(void* data, int32_t dtype, int64_t count, double value, int device,
                    void* stream) {
  return tea::guarded([&] { tea::fill_elements({data, dtype, count}, value, {device, stream}); });
}

tea_status tea_amax(const void* data, int32_t dtype, int64_t count, float* amax, int device,
                    void* stream) {
  return tea::guarded([&] { tea::update_amax({data, dtype, count}, amax, {device, stream}); });
}

}  // extern "C"
