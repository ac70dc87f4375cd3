// TransformerEngine's functions for JAX, on its C API: backend, auxiliary tensors, workspace sizes.
#pragma once
#include <cstdint>
#include <vector>

#include "transformer_engine/fused_attn.h"

namespace transformer_engine::jax {

// NOLINTBEGIN(readability-identifier-naming): the names are TransformerEngine's, or like them.
NVTE_Fused_Attn_Backend GetFusedAttnBackend(
    bool is_training, DType q_dtype, DType kv_dtype, NVTE_QKV_Layout qkv_layout,
    NVTE_Bias_Type bias_type, NVTE_Mask_Type mask_type, NVTE_Softmax_Type softmax_type,
    float dropout_probability, size_t q_attn_heads, size_t kv_attn_heads, size_t q_max_seqlen,
    size_t kv_max_seqlen, size_t qk_head_dim, size_t v_head_dim, int64_t window_size_left,
    int64_t window_size_right, bool deterministic);

// Fills a pack with tensors over these buffers, in the order in which nvte_fused_attn_fwd has them:
// LSE, rng_state, then the bias if bias_type reads one and the softmax offset if there is one. For
// NVTE_F16_max512_seqlen: one tensor of the size of the probabilities.
void PrepareFusedAttnForwardAuxTensors(NVTETensorPack* tensor_pack, size_t input_batch,
                                       size_t bias_batch, size_t attn_heads, size_t bias_heads,
                                       size_t q_max_seqlen, size_t kv_max_seqlen, DType dtype,
                                       NVTE_Bias_Type bias_type, NVTE_Fused_Attn_Backend backend,
                                       void* softmax_buf, void* rng_state_buf, void* bias_buf,
                                       void* softmax_offset_buf);

// The same for backward. TransformerEngine packs a bias also where there is none, which moves the
// softmax offset to a place that its core does not read; here the pack is dense.
void PrepareFusedAttnBackwardAuxTensors(NVTETensorPack* tensor_pack, size_t input_batch,
                                        size_t bias_batch, size_t attn_heads, size_t bias_heads,
                                        size_t q_max_seqlen, size_t kv_max_seqlen, DType dtype,
                                        NVTE_Fused_Attn_Backend backend, void* softmax_buf,
                                        void* rng_state_buf, void* bias_buf,
                                        void* softmax_offset_buf);

// The arguments of both handlers and both workspace queries: the attributes of the custom calls.
struct FusedAttnConfig {
  int64_t input_batch, bias_batch, q_max_seqlen, kv_max_seqlen, attn_heads, num_gqa_groups,
      bias_heads, qk_head_dim, v_head_dim, max_segments_per_seq, window_size_left,
      window_size_right;
  double scaling_factor, dropout_probability;
  int64_t bias_type, mask_type, qkv_layout, softmax_type;
  bool is_training, deterministic, bottom_right_diagonal;

  bool is_ragged() const { return nvte_get_qkv_format(layout()) == NVTE_THD; }
  int64_t num_segments() const { return input_batch * (is_ragged() ? max_segments_per_seq : 1); }
  NVTE_QKV_Layout layout() const { return static_cast<NVTE_QKV_Layout>(qkv_layout); }
  NVTE_Bias_Type bias() const { return static_cast<NVTE_Bias_Type>(bias_type); }
  NVTE_Mask_Type mask() const { return static_cast<NVTE_Mask_Type>(mask_type); }
  NVTE_Softmax_Type softmax() const { return static_cast<NVTE_Softmax_Type>(softmax_type); }
  bool has_bias() const { return bias_type != NVTE_NO_BIAS; }
  bool has_padding() const {
    return mask_type == NVTE_PADDING_MASK || mask_type == NVTE_PADDING_CAUSAL_MASK ||
           mask_type == NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK;
  }
  NVTE_Fused_Attn_Backend backend(DType dtype_q, DType dtype_kv) const;
};

// Throws std::runtime_error, naming the attribute, unless all sizes and enums are valid.
void Require(const FusedAttnConfig& config);

struct WorkspaceSize {
  std::vector<size_t> shape;
  DType dtype;
};

// By the size queries of the C API: a pure function that needs no GPU. At least one byte.
WorkspaceSize GetFusedAttnForwardWorkspaceSizes(const FusedAttnConfig& config, DType dtype);
WorkspaceSize GetFusedAttnBackwardWorkspaceSizes(const FusedAttnConfig& config, DType dtype);

// Pointers of one call; NULL: a size query, or a tensor that the call does not have.
struct FusedAttnBuffers {
  void *q, *k, *v, *bias, *softmax_offset, *softmax_aux, *rng_state;
  void *q_cu_seqlens, *kv_cu_seqlens, *q_seq_offsets, *k_seq_offsets;
  void *output, *doutput, *dq, *dk, *dv, *dbias, *dsoftmax_offset;
  void* workspace;
  size_t workspace_bytes;
};

// nvte_fused_attn_fwd and _bwd of these buffers. Without a workspace they run nothing and return
// the bytes that it needs. They throw what the C API throws.
size_t Forward(const FusedAttnConfig& config, DType dtype, const FusedAttnBuffers& buffers,
               void* stream);
size_t Backward(const FusedAttnConfig& config, DType dtype, const FusedAttnBuffers& buffers,
                void* stream);
// NOLINTEND(readability-identifier-naming)

}  // namespace transformer_engine::jax
