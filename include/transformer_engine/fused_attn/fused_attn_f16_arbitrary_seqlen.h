/* fused_attn_f16_arbitrary_seqlen.h: the functions that nvte_fused_attn_fwd and _bwd call with the
   unpacked tensors, as in TransformerEngine f04b094c. Empty in C; every function throws
   std::runtime_error.

   Sizes count elements. Pointers to tensors that a call does not need may be NULL. As in
   fused_attn.h, a first call returns the sizes of workspace and auxiliary tensors, and a second
   call computes. */
#ifndef TRANSFORMER_ENGINE_FUSED_ATTN_F16_ARBITRARY_SEQLEN_H_
#define TRANSFORMER_ENGINE_FUSED_ATTN_F16_ARBITRARY_SEQLEN_H_
#include "../fused_attn.h"

typedef struct cudnnContext* cudnnHandle_t; /* opaque, and not used */

#ifdef __cplusplus
#pragma GCC visibility push(default)

namespace transformer_engine {

// The object behind an NVTETensor.
struct Tensor;

// The object of a handle, valid as long as the handle. For a handle without a tensor it returns
// NULL or throws "Invalid tensor.".
Tensor* convertNVTETensor(const NVTETensor tensor);
Tensor* convertNVTETensorCheck(const NVTETensor tensor);

// num_tokens_*: rows of THD buffers. num_pages_*, page_size_*, max_pages_per_seq_* (columns of the
// page tables): for paged layouts, else 0.
void fused_attn_arbitrary_seqlen_fwd(
    size_t batch, size_t num_attn_heads, size_t num_gqa_groups, size_t max_seqlen_q,
    size_t max_seqlen_kv, size_t head_dim_qk, size_t head_dim_v, size_t num_tokens_q,
    size_t num_tokens_kv, size_t num_pages_k, size_t num_pages_v, size_t page_size_k,
    size_t page_size_v, size_t max_pages_per_seq_k, size_t max_pages_per_seq_v, bool is_training,
    bool return_max_logit, float attn_scale, float p_dropout, NVTE_QKV_Layout qkv_layout,
    NVTE_Bias_Type bias_type, NVTE_Mask_Type mask_type, NVTE_Softmax_Type softmax_type,
    int64_t window_size_left, int64_t window_size_right, bool bottom_right_diagonal,
    const Tensor* input_Q, const Tensor* input_K, const Tensor* input_V, const Tensor* input_Bias,
    const Tensor* input_SoftmaxOffset, Tensor* output_O, NVTETensorPack* Aux_CTX_Tensors,
    const Tensor* cu_seqlens_q, const Tensor* cu_seqlens_kv, const Tensor* cu_seqlens_q_padded,
    const Tensor* cu_seqlens_kv_padded, const Tensor* page_table_k, const Tensor* page_table_v,
    const Tensor* rng_state, Tensor* workspace, cudaStream_t stream, cudnnHandle_t handle);

// Unlike nvte_fused_attn_bwd, it takes the auxiliary tensors of forward as separate arguments:
// output_S is the LSE, [b, h, sq, 1], or [t, h, 1] for THD layouts.
void fused_attn_arbitrary_seqlen_bwd(
    size_t batch, size_t num_attn_heads, size_t num_gqa_groups, size_t max_seqlen_q,
    size_t max_seqlen_kv, size_t head_dim_qk, size_t head_dim_v, size_t num_tokens_q,
    size_t num_tokens_kv, float attn_scale, float p_dropout, NVTE_QKV_Layout qkv_layout,
    NVTE_Bias_Type bias_type, NVTE_Mask_Type mask_type, NVTE_Softmax_Type softmax_type,
    int64_t window_size_left, int64_t window_size_right, bool bottom_right_diagonal,
    bool deterministic, const Tensor* input_Q, const Tensor* input_K, const Tensor* input_V,
    const Tensor* input_O, const Tensor* input_dO, const Tensor* input_Bias,
    const Tensor* input_SoftmaxOffset, Tensor* output_S, Tensor* output_dQ, Tensor* output_dK,
    Tensor* output_dV, Tensor* output_dBias, Tensor* output_dSoftmaxOffset,
    const Tensor* cu_seqlens_q, const Tensor* cu_seqlens_kv, const Tensor* cu_seqlens_q_padded,
    const Tensor* cu_seqlens_kv_padded, const Tensor* rng_state, Tensor* workspace,
    cudaStream_t stream, cudnnHandle_t handle);

}  // namespace transformer_engine

#pragma GCC visibility pop
#endif

#endif
