// The operators of the namespace te_attention: the arguments are read from the stack in the order
// of the schemas, which are in python/te_attention/torch/_schemas.py.
#pragma once
#include "torch/stack.h"

namespace tea::torch_ops {

using Operator = void(Stack& stack);

// attention.cpp
Operator forward, forward_minimal, inference, inference_plain, backward, backward_minimal,
    backward_out, backward_minimal_out, fp8_forward, fp8_forward_amax, fp8_backward,
    fp8_backward_out, part_forward, record_part_forward, part_backward, record_part_backward,
    fp8_part_forward, fp8_part_backward, explain, fused_forward, fused_backward;
// fp8_attention.cpp
Operator fp8_attention_forward, fp8_attention_backward;
// cache.cpp
Operator kv_cache_append, thd_to_bshd, bshd_to_thd, cu_seqlens_from_lengths, cu_seqlens_from_mask;
// random.cpp
Operator rng_fill, rng_fill_captured, rng_advance, dropout_mask;
// context_parallel.cpp
Operator merge, merge_into, round_o, cp_read_half, cp_lse_correct, cp_lse_read, cp_out_correct,
    cp_grad_correct, cp_partition_indices, cp_to_rank_order, cp_to_sequence_order, cp_copy_valid;
void merge_into(const Tensor& o, const Tensor& lse, const Tensor& part_o, const Tensor& part_lse);
void round_o(const Tensor& o, const Tensor& sums, const Tensor& lse);
// replay.cpp
Operator replay;
// softmax.cpp
Operator scaled_softmax_forward, scaled_softmax_backward, flash_prepare_forward,
    flash_prepare_backward;
// fp8.cpp
Operator fp8_quantize, fp8_quantize_joint, fp8_quantize_current, fp8_quantize_joint_current,
    fp8_dequantize, fp8_scale, fp8_update_scales, amax, fill, fill_bytes;

}  // namespace tea::torch_ops
