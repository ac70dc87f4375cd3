// The main entry points: each collects its parameters in one struct for the translation.
#include "transformer_engine/fused_attn.h"

#include "nvte/attention.h"
#include "nvte/aux_tensors.h"
#include "nvte/backend.h"
#include "nvte/boundary.h"
#include "nvte/entry.h"
#include "nvte/work.h"

namespace tea::nvte {

void enter(const ForwardCall& call) {
  const Work work = work_of(call);
  forward(call, work, accepted_backend(work));
}

void enter(BackwardCall call, const NVTETensorPack& pack) {
  const Work work = work_of(call);
  call.aux = read_aux(pack, work, accepted_backend(work, pack));
  backward(call, work);
}

}  // namespace tea::nvte

using tea::nvte::BackwardCall;
using tea::nvte::ForwardCall;
using tea::nvte::needed_pack;
using tea::nvte::signed_size;

// NOLINTBEGIN(readability-function-size): the signatures are TransformerEngine's.
void nvte_fused_attn_fwd(const NVTETensor Q, const NVTETensor K, const NVTETensor V,
                         const NVTETensor Bias, const NVTETensor SoftmaxOffset, NVTETensor S,
                         NVTETensor O, NVTETensorPack* Aux_CTX_Tensors,
                         const NVTETensor cu_seqlens_q, const NVTETensor cu_seqlens_kv,
                         const NVTETensor cu_seqlens_q_padded,
                         const NVTETensor cu_seqlens_kv_padded, const NVTETensor page_table_k,
                         const NVTETensor page_table_v, const NVTETensor rng_state,
                         size_t max_seqlen_q, size_t max_seqlen_kv, bool is_training,
                         bool return_max_logit, bool /*cuda_graph*/, float attn_scale,
                         float dropout, NVTE_QKV_Layout qkv_layout, NVTE_Bias_Type bias_type,
                         NVTE_Mask_Type attn_mask_type, NVTE_Softmax_Type softmax_type,
                         int64_t window_size_left, int64_t window_size_right,
                         bool bottom_right_diagonal, NVTETensor workspace, cudaStream_t stream) {
  TEA_NVTE_EXPORTED({
    ForwardCall call{};
    call.options = {qkv_layout,       bias_type,         attn_mask_type,        softmax_type,
                    window_size_left, window_size_right, bottom_right_diagonal, attn_scale,
                    dropout,          is_training,       return_max_logit};
    call.max_q = signed_size(max_seqlen_q), call.max_kv = signed_size(max_seqlen_kv);
    call.q = &TEA_TENSOR(Q), call.k = &TEA_TENSOR(K), call.v = &TEA_TENSOR(V),
    call.s = &TEA_TENSOR(S);
    call.bias = &TEA_TENSOR(Bias), call.softmax_offset = &TEA_TENSOR(SoftmaxOffset),
    call.o = &TEA_TENSOR(O);
    call.cu_seqlens_q = &TEA_TENSOR(cu_seqlens_q), call.cu_seqlens_kv = &TEA_TENSOR(cu_seqlens_kv);
    call.cu_seqlens_q_padded = &TEA_TENSOR(cu_seqlens_q_padded);
    call.cu_seqlens_kv_padded = &TEA_TENSOR(cu_seqlens_kv_padded);
    call.table_k = &TEA_TENSOR(page_table_k), call.table_v = &TEA_TENSOR(page_table_v);
    call.rng_state = &TEA_TENSOR(rng_state), call.workspace = &TEA_TENSOR(workspace);
    call.aux = &needed_pack(Aux_CTX_Tensors), call.stream = stream;
    enter(call);
  });
}

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
                         bool bottom_right_diagonal, bool deterministic, bool /*cuda_graph*/,
                         NVTETensor workspace, cudaStream_t stream) {
  TEA_NVTE_EXPORTED({
    BackwardCall call{};
    call.options = {qkv_layout,       bias_type,         attn_mask_type,        softmax_type,
                    window_size_left, window_size_right, bottom_right_diagonal, attn_scale,
                    dropout};
    call.options.training = true, call.options.deterministic = deterministic;
    call.max_q = signed_size(max_seqlen_q), call.max_kv = signed_size(max_seqlen_kv);
    call.q = &TEA_TENSOR(Q), call.k = &TEA_TENSOR(K), call.v = &TEA_TENSOR(V),
    call.s = &TEA_TENSOR(S);
    call.o = &TEA_TENSOR(O), call.dout = &TEA_TENSOR(dO), call.dp = &TEA_TENSOR(dP);
    call.dq = &TEA_TENSOR(dQ), call.dk = &TEA_TENSOR(dK), call.dv = &TEA_TENSOR(dV);
    call.dbias = &TEA_TENSOR(dBias), call.dsoftmax_offset = &TEA_TENSOR(dSoftmaxOffset);
    call.cu_seqlens_q = &TEA_TENSOR(cu_seqlens_q), call.cu_seqlens_kv = &TEA_TENSOR(cu_seqlens_kv);
    call.cu_seqlens_q_padded = &TEA_TENSOR(cu_seqlens_q_padded);
    call.cu_seqlens_kv_padded = &TEA_TENSOR(cu_seqlens_kv_padded);
    call.workspace = &TEA_TENSOR(workspace), call.stream = stream;
    enter(call, needed_pack(Aux_CTX_Tensors));
  });
}

// NOLINTEND(readability-function-size)
