/* fused_attn.h: fused attention through TransformerEngine's C API (names, values and signatures of
   TransformerEngine f04b094c). Every option that the library can compute is accepted in every
   combination; docs/compatibility.md lists the differences.

   Functions throw std::runtime_error, so C++ must call them; te_attention.h is the interface for C.

   Letters: b sequences, h query heads, hg heads of K and V, sq and skv the max_seqlen arguments,
   d_qk and d_v head dims, t tokens of a ragged (THD) buffer. "Empty" is a valid handle that holds
   no data. All sizes count elements, all device arrays are read when the stream reaches them. */
#ifndef TRANSFORMER_ENGINE_FUSED_ATTN_H_
#define TRANSFORMER_ENGINE_FUSED_ATTN_H_
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "transformer_engine.h"

#pragma GCC visibility push(default)

#ifdef __cplusplus
#define NVTE_DEPRECATED_FUNCTION(instead) [[deprecated(instead)]]
/* Some parameters are references to handles, which C writes as pointers. */
#define NVTE_TENSOR_REFERENCE const NVTETensor&
extern "C" {
#else
#define NVTE_DEPRECATED_FUNCTION(instead)
#define NVTE_TENSOR_REFERENCE const NVTETensor*
#endif

/* Memory order of Q, K and V, the last letter contiguous: s sequence, b batch, t token, h head,
   d head dim. A 3 or 2 marks where Q, K, V (or K, V) interleave in one buffer. */
typedef enum NVTE_QKV_Layout {
  NVTE_SB3HD = 0,
  NVTE_SBH3D = 1,
  NVTE_SBHD_SB2HD = 2,
  NVTE_SBHD_SBH2D = 3,
  NVTE_SBHD_SBHD_SBHD = 4,
  NVTE_BS3HD = 5,
  NVTE_BSH3D = 6,
  NVTE_BSHD_BS2HD = 7,
  NVTE_BSHD_BSH2D = 8,
  NVTE_BSHD_BSHD_BSHD = 9,
  NVTE_T3HD = 10,
  NVTE_TH3D = 11,
  NVTE_THD_T2HD = 12,
  NVTE_THD_TH2D = 13,
  NVTE_THD_THD_THD = 14,
  NVTE_SBHD_BSHD_BSHD = 15,
  NVTE_BSHD_SBHD_SBHD = 16,
  NVTE_THD_BSHD_BSHD = 17,
  NVTE_THD_SBHD_SBHD = 18,
  /* K and V in pages: [num_pages, page_size, hg, d] for BSHD, [page_size, num_pages, hg, d] for
     SBHD. */
  NVTE_Paged_KV_BSHD_BSHD_BSHD = 19,
  NVTE_Paged_KV_BSHD_SBHD_SBHD = 20,
  NVTE_Paged_KV_SBHD_BSHD_BSHD = 21,
  NVTE_Paged_KV_SBHD_SBHD_SBHD = 22,
  NVTE_Paged_KV_THD_BSHD_BSHD = 23,
  NVTE_Paged_KV_THD_SBHD_SBHD = 24
} NVTE_QKV_Layout;

/* How Q, K and V share buffers. */
typedef enum NVTE_QKV_Layout_Group {
  NVTE_3HD = 0,
  NVTE_H3D = 1,
  NVTE_HD_2HD = 2,
  NVTE_HD_H2D = 3,
  NVTE_HD_HD_HD = 4,
  NVTE_Paged_KV_HD_HD_HD = 5
} NVTE_QKV_Layout_Group;

/* Order of batch and sequence; the mixed ones name Q's format first. */
typedef enum NVTE_QKV_Format {
  NVTE_SBHD = 0,
  NVTE_BSHD = 1,
  NVTE_THD = 2,
  NVTE_BSHD_2SBHD = 3,
  NVTE_SBHD_2BSHD = 4,
  NVTE_THD_2BSHD = 5,
  NVTE_THD_2SBHD = 6
} NVTE_QKV_Format;

typedef enum NVTE_Bias_Type {
  NVTE_NO_BIAS = 0,
  NVTE_PRE_SCALE_BIAS = 1,  /* scale * (q.k + bias) */
  NVTE_POST_SCALE_BIAS = 2, /* scale * q.k + bias */
  NVTE_ALIBI = 3            /* scale * q.k - slope * distance, the published slopes */
} NVTE_Bias_Type;

/* Causal is aligned at the top left corner, or at the bottom right one of the actual lengths. */
typedef enum NVTE_Mask_Type {
  NVTE_NO_MASK = 0,
  NVTE_PADDING_MASK = 1,
  NVTE_CAUSAL_MASK = 2,
  NVTE_PADDING_CAUSAL_MASK = 3,
  NVTE_CAUSAL_BOTTOM_RIGHT_MASK = 4,
  NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK = 5
} NVTE_Mask_Type;

typedef enum NVTE_Softmax_Type {
  NVTE_VANILLA_SOFTMAX = 0,
  NVTE_OFF_BY_ONE_SOFTMAX = 1, /* an additional exp(0) in the denominator */
  NVTE_LEARNABLE_SOFTMAX = 2   /* an additional exp(offset of the head) in the denominator */
} NVTE_Softmax_Type;

/* The class of a call. It determines the auxiliary tensors, not the kernel that runs. */
typedef enum NVTE_Fused_Attn_Backend {
  NVTE_No_Backend = -1,
  NVTE_F16_max512_seqlen = 0,
  NVTE_F16_arbitrary_seqlen = 1,
  NVTE_FP8 = 2
} NVTE_Fused_Attn_Backend;

/* An unknown layout throws "qkv_layout not supported!". */
NVTE_QKV_Layout_Group nvte_get_qkv_layout_group(NVTE_QKV_Layout qkv_layout);
NVTE_QKV_Format nvte_get_qkv_format(NVTE_QKV_Layout qkv_layout);
NVTE_QKV_Format nvte_get_q_format(NVTE_QKV_Layout qkv_layout);
NVTE_QKV_Format nvte_get_kv_format(NVTE_QKV_Layout qkv_layout);

/* The class that nvte_fused_attn_fwd and _bwd will use, or NVTE_No_Backend if they would refuse the
   call: on the current GPU if this process uses one (below sm_80, or in a library without GPU code,
   they refuse all device memory), else on the host. Throws if q_dtype and kv_dtype differ or an
   enum value is unknown. NVTE_F16_max512_seqlen is selected only if the environment variable
   NVTE_FUSED_ATTN_BACKEND is 0. */
NVTE_Fused_Attn_Backend nvte_get_fused_attn_backend(
    bool is_training, NVTEDType q_dtype, NVTEDType kv_dtype, NVTE_QKV_Layout qkv_layout,
    NVTE_Bias_Type bias_type, NVTE_Mask_Type attn_mask_type, NVTE_Softmax_Type softmax_type,
    float dropout, size_t num_attn_heads, size_t num_gqa_groups, size_t max_seqlen_q,
    size_t max_seqlen_kv, size_t head_dim_qk, size_t head_dim_v, int64_t window_size_left,
    int64_t window_size_right, bool return_max_logit, bool cuda_graph, bool deterministic);

/* O = dropout(softmax(mask(scale * Q K^T + bias))) V.

   Call it twice. If the workspace's data is NULL, nothing runs and the workspace's shape is set to
   the bytes needed. If Aux_CTX_Tensors->size is 0, the pack's shapes, dtypes and size are set. Then
   allocate memory for both and call again with the same arguments.

   Q [..., h, d_qk], K [..., hg, d_qk], V [..., hg, d_v]: fp16, bf16 or fp8, in the order of
   qkv_layout; in packed buffers each points to its own first element. fp8 tensors have scaling mode
   0: one fp32 scale each.
   Bias: [1 or b, 1 or h, sq, skv] or [1 or b, 1 or h, 1, skv], always read with the dtype of Q (for
   fp8 problems, with its own dtype). Empty unless bias_type reads it.
   SoftmaxOffset: fp32 [1, h, 1, 1] for NVTE_LEARNABLE_SOFTMAX.
   S: the scale, scale_inv and amax of the probabilities, fp8 only.
   O: [..., h, d_v] in Q's order. fp8, or fp16 or bf16 for fp8 inputs.
   cu_seqlens_*: int32 [b + 1], cumulative lengths, read only if the mask type has PADDING; the
   shape of cu_seqlens_q always determines b. cu_seqlens_*_padded: int32 [b + 1], the first token of
   each sequence in a THD buffer; empty if there are no gaps.
   page_table_*: int32 [b, pages of a sequence]. rng_state: int64 {seed, offset}.
   window_size_*: keys further from the diagonal are masked; -1 is no bound. The mask type
   determines the diagonal of causal masks, bottom_right_diagonal that of others.
   Aux_CTX_Tensors: NVTE_F16_arbitrary_seqlen: LSE fp32 [b, h, sq, 1] (THD: [t, h, 1]), or with
   return_max_logit the row maxima and the sums of exp(logit - maximum); then rng_state, and the
   bias and the softmax offset if used. NVTE_FP8: LSE, an unused tensor of its shape, rng_state,
   then the same optional tensors. NVTE_F16_max512_seqlen: one opaque [b, h, sq, skv].
   dropout is active only if is_training. */
void nvte_fused_attn_fwd(const NVTETensor Q, const NVTETensor K, const NVTETensor V,
                         const NVTETensor Bias, const NVTETensor SoftmaxOffset, NVTETensor S,
                         NVTETensor O, NVTETensorPack* Aux_CTX_Tensors,
                         const NVTETensor cu_seqlens_q, const NVTETensor cu_seqlens_kv,
                         const NVTETensor cu_seqlens_q_padded,
                         const NVTETensor cu_seqlens_kv_padded, const NVTETensor page_table_k,
                         const NVTETensor page_table_v, const NVTETensor rng_state,
                         size_t max_seqlen_q, size_t max_seqlen_kv, bool is_training,
                         bool return_max_logit, bool cuda_graph, float attn_scale, float dropout,
                         NVTE_QKV_Layout qkv_layout, NVTE_Bias_Type bias_type,
                         NVTE_Mask_Type attn_mask_type, NVTE_Softmax_Type softmax_type,
                         int64_t window_size_left, int64_t window_size_right,
                         bool bottom_right_diagonal, NVTETensor workspace, cudaStream_t stream);

/* The gradients of Q, K, V and, if used, of the bias (summed over its dimensions of 1) and of the
   softmax offset. All are overwritten. Call it twice, as forward; Aux_CTX_Tensors is the result of
   forward, its first entry the LSE. dQ, dK and dV have the layout of Q, K and V. dBias has the
   shape of the bias and determines that shape. S, dP: fp8 scales; dP.amax is written. */
void nvte_fused_attn_bwd(const NVTETensor Q, const NVTETensor K, const NVTETensor V,
                         const NVTETensor O, const NVTETensor dO, const NVTETensor S, NVTETensor dP,
                         const NVTETensorPack* Aux_CTX_Tensors, NVTETensor dQ, NVTETensor dK,
                         NVTETensor dV, NVTETensor dBias, NVTETensor dSoftmaxOffset,
                         const NVTETensor cu_seqlens_q, const NVTETensor cu_seqlens_kv,
                         const NVTETensor cu_seqlens_q_padded,
                         const NVTETensor cu_seqlens_kv_padded, size_t max_seqlen_q,
                         size_t max_seqlen_kv, float attn_scale, float dropout,
                         NVTE_QKV_Layout qkv_layout, NVTE_Bias_Type bias_type,
                         NVTE_Mask_Type attn_mask_type, NVTE_Softmax_Type softmax_type,
                         int64_t window_size_left, int64_t window_size_right,
                         bool bottom_right_diagonal, bool deterministic, bool cuda_graph,
                         NVTETensor workspace, cudaStream_t stream);

/* nvte_fused_attn_fwd for QKV in one buffer (3HD and H3D layouts): [b, s, 3, h, d], [s, b, 3, h,
   d], [t, 3, h, d], or with the 3 before d. */
NVTE_DEPRECATED_FUNCTION("use nvte_fused_attn_fwd")
void nvte_fused_attn_fwd_qkvpacked(
    const NVTETensor QKV, const NVTETensor Bias, const NVTETensor SoftmaxOffset, NVTETensor S,
    NVTETensor O, NVTETensorPack* Aux_CTX_Tensors, const NVTETensor cu_seqlens,
    const NVTETensor cu_seqlens_padded, const NVTETensor rng_state, size_t max_seqlen,
    bool is_training, bool return_max_logit, bool cuda_graph, float attn_scale, float dropout,
    NVTE_QKV_Layout qkv_layout, NVTE_Bias_Type bias_type, NVTE_Mask_Type attn_mask_type,
    NVTE_Softmax_Type softmax_type, int64_t window_size_left, int64_t window_size_right,
    bool bottom_right_diagonal, NVTETensor workspace, cudaStream_t stream);

NVTE_DEPRECATED_FUNCTION("use nvte_fused_attn_bwd")
void nvte_fused_attn_bwd_qkvpacked(
    const NVTETensor QKV, const NVTETensor O, const NVTETensor dO, const NVTETensor S,
    NVTETensor dP, const NVTETensorPack* Aux_CTX_Tensors, NVTETensor dQKV, NVTETensor dBias,
    NVTETensor dSoftmaxOffset, const NVTETensor cu_seqlens, const NVTETensor cu_seqlens_padded,
    size_t max_seqlen, float attn_scale, float dropout, NVTE_QKV_Layout qkv_layout,
    NVTE_Bias_Type bias_type, NVTE_Mask_Type attn_mask_type, NVTE_Softmax_Type softmax_type,
    int64_t window_size_left, int64_t window_size_right, bool bottom_right_diagonal,
    bool deterministic, bool cuda_graph, NVTETensor workspace, cudaStream_t stream);

/* nvte_fused_attn_fwd for K and V in one buffer (HD_2HD and HD_H2D layouts): [b, s, 2, hg, d],
   [s, b, 2, hg, d], [t, 2, hg, d], or with the 2 before d. */
NVTE_DEPRECATED_FUNCTION("use nvte_fused_attn_fwd")
void nvte_fused_attn_fwd_kvpacked(
    const NVTETensor Q, const NVTETensor KV, const NVTETensor Bias, const NVTETensor SoftmaxOffset,
    NVTETensor S, NVTETensor O, NVTETensorPack* Aux_CTX_Tensors, const NVTETensor cu_seqlens_q,
    const NVTETensor cu_seqlens_kv, const NVTETensor cu_seqlens_q_padded,
    const NVTETensor cu_seqlens_kv_padded, const NVTETensor page_table_k,
    const NVTETensor page_table_v, const NVTETensor rng_state, size_t max_seqlen_q,
    size_t max_seqlen_kv, bool is_training, bool return_max_logit, bool cuda_graph,
    float attn_scale, float dropout, NVTE_QKV_Layout qkv_layout, NVTE_Bias_Type bias_type,
    NVTE_Mask_Type attn_mask_type, NVTE_Softmax_Type softmax_type, int64_t window_size_left,
    int64_t window_size_right, bool bottom_right_diagonal, NVTETensor workspace,
    cudaStream_t stream);

NVTE_DEPRECATED_FUNCTION("use nvte_fused_attn_bwd")
void nvte_fused_attn_bwd_kvpacked(
    const NVTETensor Q, const NVTETensor KV, const NVTETensor O, const NVTETensor dO,
    const NVTETensor S, NVTETensor dP, const NVTETensorPack* Aux_CTX_Tensors, NVTETensor dQ,
    NVTETensor dKV, NVTETensor dBias, NVTETensor dSoftmaxOffset, const NVTETensor cu_seqlens_q,
    const NVTETensor cu_seqlens_kv, const NVTETensor cu_seqlens_q_padded,
    const NVTETensor cu_seqlens_kv_padded, size_t max_seqlen_q, size_t max_seqlen_kv,
    float attn_scale, float dropout, NVTE_QKV_Layout qkv_layout, NVTE_Bias_Type bias_type,
    NVTE_Mask_Type attn_mask_type, NVTE_Softmax_Type softmax_type, int64_t window_size_left,
    int64_t window_size_right, bool bottom_right_diagonal, bool deterministic, bool cuda_graph,
    NVTETensor workspace, cudaStream_t stream);

/* rng_state_ptr[0..1] = {*seed_ptr, *offset_ptr + offset_intragraph} if captured, else
   {seed_val, offset_val}. All pointers are to device memory; seed_ptr and offset_ptr are read only
   if captured. */
void nvte_extract_seed_and_offset(int64_t* rng_state_ptr, int captured, int64_t* seed_ptr,
                                  uint64_t seed_val, int64_t* offset_ptr, uint64_t offset_val,
                                  uint32_t offset_intragraph, cudaStream_t stream);

/* rng_state_dst[0..1] = {seed[0], counter}. rng_state_dst and seed are raw int64 pointers, not
   handles. The counter belongs to the calling thread and then advances by 16
   (NVTE_F16_arbitrary_seqlen) or by ceil(q_max_seqlen * kv_max_seqlen / 128). */
void nvte_populate_rng_state_async(NVTETensor rng_state_dst, const NVTETensor seed,
                                   size_t q_max_seqlen, size_t kv_max_seqlen,
                                   NVTE_Fused_Attn_Backend backend, cudaStream_t stream);

/* The number of positive values in the first `len` int32 of cu_seqlens. Both are raw pointers, not
   handles; workspace has 4 bytes. Synchronises the stream. */
uint32_t nvte_get_runtime_num_segments(NVTETensor cu_seqlens, NVTETensor workspace, size_t len,
                                       cudaStream_t stream);

/* Appends new tokens to a cache. new_k, new_v: contiguous [b, max_ctx_len, h, d], [max_ctx_len, b,
   h, d] or [t, h, d] as in qkv_format; caches [pages, page_size, h, d]. cu_new_lens,
   cu_cached_lens: int32 [b + 1], cached lengths include the new tokens. is_non_paged: page_table
   holds batch indices [b], and the cache's rows are first moved to the order of the batch. */
void nvte_copy_to_kv_cache(NVTETensor new_k, NVTETensor new_v, NVTETensor k_cache,
                           NVTETensor v_cache, NVTETensor page_table, NVTETensor cu_new_lens,
                           NVTETensor cu_cached_lens, NVTE_QKV_Format qkv_format, int b,
                           int max_ctx_len, int max_seq_len, int max_pages_per_seq,
                           int is_non_paged, cudaStream_t stream);

/* [t, h, d] to [b, max_seq_len, h, d] and back; padding is not written. cu_seqlens int32 [b + 1].
 */
void nvte_convert_thd_to_bshd(NVTETensor tensor, NVTETensor cu_seqlens, NVTETensor new_tensor,
                              int b, int max_seq_len, cudaStream_t stream);
void nvte_convert_bshd_to_thd(NVTETensor tensor, NVTETensor cu_seqlens, NVTETensor new_tensor,
                              int t, cudaStream_t stream);

/* Interleaved [s, b, n, 3 h] to separate [3, b, s, n, h] and back; fp16 or bf16. */
void nvte_prepare_flash_attn_fwd(NVTETensor qkvi, NVTETensor qkv, cudaStream_t stream);
void nvte_prepare_flash_attn_bwd(NVTETensor q, NVTETensor k, NVTETensor v, NVTETensor qkv,
                                 cudaStream_t stream);

/* Context parallelism on THD buffers. cu_seqlens: int32 [b + 1], padded lengths, all even; a half
   tensor packs one half of every sequence. Copies the first (half_idx 0) or last halves. */
void nvte_cp_thd_read_half_tensor(NVTE_TENSOR_REFERENCE tensor, NVTE_TENSOR_REFERENCE cu_seqlens,
                                  NVTETensor half, int half_idx, cudaStream_t stream);

/* On the second half of each sequence lse = log(exp(lse) + exp(lse_per_step)). fp32; lse_packed:
   [h, t] and [h, t / 2], else [b, h, s] and [b, h, s / 2]. */
void nvte_cp_thd_second_half_lse_correction(NVTETensor lse, NVTE_TENSOR_REFERENCE lse_per_step,
                                            NVTE_TENSOR_REFERENCE cu_seqlens, int lse_packed,
                                            cudaStream_t stream);

/* Writes the second halves to half_lse, with row pitch second_half_lse_seqlen; no other elements.
 */
void nvte_cp_thd_read_second_half_lse(NVTE_TENSOR_REFERENCE lse, NVTE_TENSOR_REFERENCE cu_seqlens,
                                      NVTETensor half_lse, int lse_packed,
                                      int second_half_lse_seqlen, cudaStream_t stream);

/* out += out_per_step * exp(lse_per_step - lse), of all rows or of the second halves. */
void nvte_cp_thd_out_correction(NVTETensor out, NVTE_TENSOR_REFERENCE out_per_step,
                                NVTE_TENSOR_REFERENCE lse, NVTE_TENSOR_REFERENCE lse_per_step,
                                NVTE_TENSOR_REFERENCE cu_seqlens, int only_second_half,
                                int lse_packed, cudaStream_t stream);

/* Applies "add", "copy" or "none" to the first and to the second half of every sequence. */
void nvte_cp_thd_grad_correction(NVTETensor grad, NVTE_TENSOR_REFERENCE grad_per_step,
                                 NVTE_TENSOR_REFERENCE cu_seqlens, const char* first_half,
                                 const char* second_half, cudaStream_t stream);

/* output int32 [total_tokens / world_size]: the global token index of each token of `rank`, which
   owns chunks rank and 2 * world_size - 1 - rank of every sequence. */
void nvte_cp_thd_get_partitioned_indices(NVTE_TENSOR_REFERENCE cu_seqlens, NVTETensor output,
                                         int total_tokens, int world_size, int rank,
                                         cudaStream_t stream);

#ifdef __cplusplus
} /* extern "C" */

/* nvte_fused_attn_fwd without softmax offset, gaps between sequences, pages and row maxima; windows
   are relative to the mask's diagonal. */
inline void nvte_fused_attn_fwd(const NVTETensor Q, const NVTETensor K, const NVTETensor V,
                                const NVTETensor Bias, NVTETensor S, NVTETensor O,
                                NVTETensorPack* Aux_CTX_Tensors, const NVTETensor cu_seqlens_q,
                                const NVTETensor cu_seqlens_kv, const NVTETensor rng_state,
                                size_t max_seqlen_q, size_t max_seqlen_kv, bool is_training,
                                float attn_scale, float dropout, NVTE_QKV_Layout qkv_layout,
                                NVTE_Bias_Type bias_type, NVTE_Mask_Type attn_mask_type,
                                int64_t window_size_left, int64_t window_size_right,
                                NVTETensor workspace, cudaStream_t stream) {
  const transformer_engine::TensorWrapper empty;
  const bool bottom_right = attn_mask_type == NVTE_CAUSAL_BOTTOM_RIGHT_MASK ||
                            attn_mask_type == NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK;
  nvte_fused_attn_fwd(Q, K, V, Bias, empty.data(), S, O, Aux_CTX_Tensors, cu_seqlens_q,
                      cu_seqlens_kv, empty.data(), empty.data(), empty.data(), empty.data(),
                      rng_state, max_seqlen_q, max_seqlen_kv, is_training, false, false, attn_scale,
                      dropout, qkv_layout, bias_type, attn_mask_type, NVTE_VANILLA_SOFTMAX,
                      window_size_left, window_size_right, bottom_right, workspace, stream);
}
#endif

#pragma GCC visibility pop

#endif
