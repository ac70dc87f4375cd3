// The two C++ functions of fused_attn_f16_arbitrary_seqlen.h. Sizes are arguments and the backend
// is fixed; otherwise they are like every other call.
#include "nvte/attention.h"
#include "nvte/boundary.h"
#include "nvte/problem.h"
#include "nvte/work.h"
#include "transformer_engine/fused_attn/fused_attn_f16_arbitrary_seqlen.h"

namespace transformer_engine {
namespace {

using tea::nvte::BackwardCall;
using tea::nvte::ForwardCall;
using tea::nvte::signed_size;
using tea::nvte::Sizes;
using tea::nvte::Work;
using tea::nvte::work_of;

// The tensor that replaces a null pointer.
const Tensor kEmpty;
const Tensor* or_empty(const Tensor* tensor) { return tensor ? tensor : &kEmpty; }

template <class T>
T* needed(const char* name, T* tensor) {
  TEA_REQUIRE(tensor, name, tensor, "a tensor");
  return tensor;
}

void check(const Work& work) {
  TEA_REQUIRE(!tea::nvte::is_fp8(work.types.q), "dtype of Q", static_cast<int>(work.types.q),
              "a type of 16 or 32 bits; FP8 goes through nvte_fused_attn_fwd and _bwd");
  const std::string why = tea::nvte::refusal(work);
  if (!why.empty()) TEA_NVTE_ERROR(why);
}

}  // namespace

Tensor* convertNVTETensor(const NVTETensor tensor) { return tea::nvte::find(tensor); }
Tensor* convertNVTETensorCheck(const NVTETensor tensor) { return &tea::nvte::tensor(tensor); }

// NOLINTBEGIN(readability-function-size): the signatures are TransformerEngine's.
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
    const Tensor* rng_state, Tensor* workspace, cudaStream_t stream, cudnnHandle_t /*handle*/) {
  TEA_NVTE_EXPORTED({
    const Sizes sizes = {
        .batch = signed_size(batch),
        .heads_q = signed_size(num_attn_heads),
        .heads_kv = signed_size(num_gqa_groups),
        .max_q = signed_size(max_seqlen_q),
        .max_kv = signed_size(max_seqlen_kv),
        .dim_qk = signed_size(head_dim_qk),
        .dim_v = signed_size(head_dim_v),
        .tokens_q = signed_size(num_tokens_q),
        .tokens_kv = signed_size(num_tokens_kv),
        .k = {signed_size(num_pages_k), signed_size(page_size_k), signed_size(max_pages_per_seq_k)},
        .v = {signed_size(num_pages_v), signed_size(page_size_v),
              signed_size(max_pages_per_seq_v)}};
    ForwardCall call{};
    call.options = {qkv_layout,
                    bias_type,
                    mask_type,
                    softmax_type,
                    window_size_left,
                    window_size_right,
                    bottom_right_diagonal,
                    attn_scale,
                    p_dropout,
                    is_training,
                    return_max_logit};
    call.q = needed("input_Q", input_Q), call.k = needed("input_K", input_K);
    call.v = needed("input_V", input_V), call.o = needed("output_O", output_O), call.s = &kEmpty;
    call.bias = or_empty(input_Bias), call.softmax_offset = or_empty(input_SoftmaxOffset);
    call.aux = needed("Aux_CTX_Tensors", Aux_CTX_Tensors);
    call.cu_seqlens_q = or_empty(cu_seqlens_q), call.cu_seqlens_kv = or_empty(cu_seqlens_kv);
    call.cu_seqlens_q_padded = or_empty(cu_seqlens_q_padded);
    call.cu_seqlens_kv_padded = or_empty(cu_seqlens_kv_padded);
    call.table_k = or_empty(page_table_k), call.table_v = or_empty(page_table_v);
    call.rng_state = or_empty(rng_state), call.workspace = needed("workspace", workspace);
    call.stream = stream;
    const Work work = work_of(call, sizes);
    check(work);
    forward(call, work, NVTE_F16_arbitrary_seqlen);
  });
}

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
    cudaStream_t stream, cudnnHandle_t /*handle*/) {
  TEA_NVTE_EXPORTED({
    const Sizes sizes = {.batch = signed_size(batch),
                         .heads_q = signed_size(num_attn_heads),
                         .heads_kv = signed_size(num_gqa_groups),
                         .max_q = signed_size(max_seqlen_q),
                         .max_kv = signed_size(max_seqlen_kv),
                         .dim_qk = signed_size(head_dim_qk),
                         .dim_v = signed_size(head_dim_v),
                         .tokens_q = signed_size(num_tokens_q),
                         .tokens_kv = signed_size(num_tokens_kv)};
    BackwardCall call{};
    call.options = {qkv_layout,
                    bias_type,
                    mask_type,
                    softmax_type,
                    window_size_left,
                    window_size_right,
                    bottom_right_diagonal,
                    attn_scale,
                    p_dropout};
    call.options.training = true, call.options.deterministic = deterministic;
    call.q = needed("input_Q", input_Q), call.k = needed("input_K", input_K);
    call.v = needed("input_V", input_V), call.o = needed("input_O", input_O), call.s = &kEmpty;
    call.dout = needed("input_dO", input_dO), call.dp = &kEmpty;
    call.dq = needed("output_dQ", output_dQ), call.dk = needed("output_dK", output_dK);
    call.dv = needed("output_dV", output_dV), call.dbias = or_empty(output_dBias);
    call.dsoftmax_offset = or_empty(output_dSoftmaxOffset);
    call.cu_seqlens_q = or_empty(cu_seqlens_q), call.cu_seqlens_kv = or_empty(cu_seqlens_kv);
    call.cu_seqlens_q_padded = or_empty(cu_seqlens_q_padded);
    call.cu_seqlens_kv_padded = or_empty(cu_seqlens_kv_padded);
    call.aux = {needed("output_S", output_S)->data.data_ptr, or_empty(rng_state)->data.data_ptr,
                or_empty(input_Bias)->data.data_ptr, or_empty(input_SoftmaxOffset)->data.data_ptr};
    call.workspace = needed("workspace", workspace), call.stream = stream;
    const Work work = work_of(call, sizes);
    tea::nvte::check_rng_state(*or_empty(rng_state), call.options);
    check(work);
    backward(call, work);
  });
}

// NOLINTEND(readability-function-size)

}  // namespace transformer_engine
