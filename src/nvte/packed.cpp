// The deprecated entry points for packed Q, K and V, which pass views into the buffers on.
#include "nvte/packed.h"

#include "nvte/boundary.h"
#include "nvte/entry.h"
#include "nvte/layout.h"

namespace tea::nvte {

Tensor packed_view(const char* name, const Tensor& buffer, NVTE_QKV_Layout layout, int index) {
  const Packing packing = layout_of(layout).packing_kv();
  const NVTEShape& shape = buffer.data.shape;
  const size_t place = shape.ndim - (packing.per_head ? 2 : 3);  // the dimension 3 or 2
  const bool fits = shape.ndim >= 4 && shape.data[place] == static_cast<size_t>(packing.tensors);
  TEA_REQUIRE(fits, std::string("shape of ") + name, text(shape),
              "[..., " + std::string(packing.per_head ? "heads, " : "") + shown(packing.tensors) +
                  (packing.per_head ? "" : ", heads") + ", head dim]");
  const size_t heads = shape.data[shape.ndim - (packing.per_head ? 3 : 2)];
  const size_t dim = shape.data[shape.ndim - 1];
  size_t rows = 1;
  for (size_t i = 0; i + 3 < shape.ndim; ++i) rows *= shape.data[i];
  Tensor view = buffer;
  view.data.shape = {{rows, heads, dim}, 3};
  const int64_t offset = packed_offset(packing, index, signed_size(heads), signed_size(dim));
  if (view.data.data_ptr)
    view.data.data_ptr = static_cast<char*>(view.data.data_ptr) +
                         static_cast<size_t>(offset) * bytes_of(view.data.dtype);
  return view;
}

namespace {

struct Views {
  Tensor q, k, v;
};

Views views_of_qkv(const char* name, NVTETensor buffer, NVTE_QKV_Layout layout) {
  if (layout_of(layout).packing_kv().tensors != 3)
    TEA_NVTE_ERROR("A packed ", name, " only supports H3D and 3HD layouts!");
  const Tensor& packed = tensor(name, buffer);
  return {packed_view(name, packed, layout, 0), packed_view(name, packed, layout, 1),
          packed_view(name, packed, layout, 2)};
}

Views views_of_kv(const char* name, const char* name_q, NVTETensor q, NVTETensor buffer,
                  NVTE_QKV_Layout layout) {
  if (layout_of(layout).packing_kv().tensors != 2)
    TEA_NVTE_ERROR("A packed ", name, " only supports HD_H2D and HD_2HD layouts!");
  const Tensor& packed = tensor(name, buffer);
  return {tensor(name_q, q), packed_view(name, packed, layout, 0),
          packed_view(name, packed, layout, 1)};
}

void set_inputs(Call& call, const Views& views) {
  call.q = &views.q, call.k = &views.k, call.v = &views.v;
}

void set_gradients(BackwardCall& call, const Views& views) {
  call.dq = &views.q, call.dk = &views.k, call.dv = &views.v;
}

}  // namespace
}  // namespace tea::nvte

using tea::nvte::BackwardCall;
using tea::nvte::ForwardCall;
using tea::nvte::needed_pack;
using tea::nvte::set_gradients;
using tea::nvte::set_inputs;
using tea::nvte::signed_size;
using tea::nvte::Tensor;
using tea::nvte::Views;
using tea::nvte::views_of_kv;
using tea::nvte::views_of_qkv;

// NOLINTBEGIN(readability-function-size): the signatures are TransformerEngine's.
void nvte_fused_attn_fwd_qkvpacked(
    const NVTETensor QKV, const NVTETensor Bias, const NVTETensor SoftmaxOffset, NVTETensor S,
    NVTETensor O, NVTETensorPack* Aux_CTX_Tensors, const NVTETensor cu_seqlens,
    const NVTETensor cu_seqlens_padded, const NVTETensor rng_state, size_t max_seqlen,
    bool is_training, bool return_max_logit, bool /*cuda_graph*/, float attn_scale, float dropout,
    NVTE_QKV_Layout qkv_layout, NVTE_Bias_Type bias_type, NVTE_Mask_Type attn_mask_type,
    NVTE_Softmax_Type softmax_type, int64_t window_size_left, int64_t window_size_right,
    bool bottom_right_diagonal, NVTETensor workspace, cudaStream_t stream) {
  TEA_NVTE_EXPORTED({
    const Views views = views_of_qkv("QKV", QKV, qkv_layout);
    const Tensor no_table;
    ForwardCall call{};
    call.options = {qkv_layout,       bias_type,         attn_mask_type,        softmax_type,
                    window_size_left, window_size_right, bottom_right_diagonal, attn_scale,
                    dropout,          is_training,       return_max_logit};
    call.max_q = call.max_kv = signed_size(max_seqlen);
    set_inputs(call, views);
    call.bias = &TEA_TENSOR(Bias), call.softmax_offset = &TEA_TENSOR(SoftmaxOffset);
    call.s = &TEA_TENSOR(S), call.o = &TEA_TENSOR(O);
    call.cu_seqlens_q = call.cu_seqlens_kv = &TEA_TENSOR(cu_seqlens);
    call.cu_seqlens_q_padded = call.cu_seqlens_kv_padded = &TEA_TENSOR(cu_seqlens_padded);
    call.table_k = call.table_v = &no_table;
    call.rng_state = &TEA_TENSOR(rng_state), call.workspace = &TEA_TENSOR(workspace);
    call.aux = &needed_pack(Aux_CTX_Tensors), call.stream = stream;
    enter(call);
  });
}

void nvte_fused_attn_bwd_qkvpacked(
    const NVTETensor QKV, const NVTETensor O, const NVTETensor dO, const NVTETensor S,
    NVTETensor dP, const NVTETensorPack* Aux_CTX_Tensors, NVTETensor dQKV, NVTETensor dBias,
    NVTETensor dSoftmaxOffset, const NVTETensor cu_seqlens, const NVTETensor cu_seqlens_padded,
    size_t max_seqlen, float attn_scale, float dropout, NVTE_QKV_Layout qkv_layout,
    NVTE_Bias_Type bias_type, NVTE_Mask_Type attn_mask_type, NVTE_Softmax_Type softmax_type,
    int64_t window_size_left, int64_t window_size_right, bool bottom_right_diagonal,
    bool deterministic, bool /*cuda_graph*/, NVTETensor workspace, cudaStream_t stream) {
  TEA_NVTE_EXPORTED({
    const Views views = views_of_qkv("QKV", QKV, qkv_layout);
    const Views gradients = views_of_qkv("dQKV", dQKV, qkv_layout);
    BackwardCall call{};
    call.options = {qkv_layout,       bias_type,         attn_mask_type,        softmax_type,
                    window_size_left, window_size_right, bottom_right_diagonal, attn_scale,
                    dropout};
    call.options.training = true, call.options.deterministic = deterministic;
    call.max_q = call.max_kv = signed_size(max_seqlen);
    set_inputs(call, views);
    set_gradients(call, gradients);
    call.s = &TEA_TENSOR(S), call.o = &TEA_TENSOR(O), call.dout = &TEA_TENSOR(dO),
    call.dp = &TEA_TENSOR(dP);
    call.dbias = &TEA_TENSOR(dBias), call.dsoftmax_offset = &TEA_TENSOR(dSoftmaxOffset);
    call.cu_seqlens_q = call.cu_seqlens_kv = &TEA_TENSOR(cu_seqlens);
    call.cu_seqlens_q_padded = call.cu_seqlens_kv_padded = &TEA_TENSOR(cu_seqlens_padded);
    call.workspace = &TEA_TENSOR(workspace), call.stream = stream;
    enter(call, needed_pack(Aux_CTX_Tensors));
  });
}

void nvte_fused_attn_fwd_kvpacked(
    const NVTETensor Q, const NVTETensor KV, const NVTETensor Bias, const NVTETensor SoftmaxOffset,
    NVTETensor S, NVTETensor O, NVTETensorPack* Aux_CTX_Tensors, const NVTETensor cu_seqlens_q,
    const NVTETensor cu_seqlens_kv, const NVTETensor cu_seqlens_q_padded,
    const NVTETensor cu_seqlens_kv_padded, const NVTETensor page_table_k,
    const NVTETensor page_table_v, const NVTETensor rng_state, size_t max_seqlen_q,
    size_t max_seqlen_kv, bool is_training, bool return_max_logit, bool /*cuda_graph*/,
    float attn_scale, float dropout, NVTE_QKV_Layout qkv_layout, NVTE_Bias_Type bias_type,
    NVTE_Mask_Type attn_mask_type, NVTE_Softmax_Type softmax_type, int64_t window_size_left,
    int64_t window_size_right, bool bottom_right_diagonal, NVTETensor workspace,
    cudaStream_t stream) {
  TEA_NVTE_EXPORTED({
    const Views views = views_of_kv("KV", "Q", Q, KV, qkv_layout);
    ForwardCall call{};
    call.options = {qkv_layout,       bias_type,         attn_mask_type,        softmax_type,
                    window_size_left, window_size_right, bottom_right_diagonal, attn_scale,
                    dropout,          is_training,       return_max_logit};
    call.max_q = signed_size(max_seqlen_q), call.max_kv = signed_size(max_seqlen_kv);
    set_inputs(call, views);
    call.bias = &TEA_TENSOR(Bias), call.softmax_offset = &TEA_TENSOR(SoftmaxOffset);
    call.s = &TEA_TENSOR(S), call.o = &TEA_TENSOR(O);
    call.cu_seqlens_q = &TEA_TENSOR(cu_seqlens_q), call.cu_seqlens_kv = &TEA_TENSOR(cu_seqlens_kv);
    call.cu_seqlens_q_padded = &TEA_TENSOR(cu_seqlens_q_padded);
    call.cu_seqlens_kv_padded = &TEA_TENSOR(cu_seqlens_kv_padded);
    call.table_k = &TEA_TENSOR(page_table_k), call.table_v = &TEA_TENSOR(page_table_v);
    call.rng_state = &TEA_TENSOR(rng_state), call.workspace = &TEA_TENSOR(workspace);
    call.aux = &needed_pack(Aux_CTX_Tensors), call.stream = stream;
    enter(call);
  });
}

void nvte_fused_attn_bwd_kvpacked(
    const NVTETensor Q, const NVTETensor KV, const NVTETensor O, const NVTETensor dO,
    const NVTETensor S, NVTETensor dP, const NVTETensorPack* Aux_CTX_Tensors, NVTETensor dQ,
    NVTETensor dKV, NVTETensor dBias, NVTETensor dSoftmaxOffset, const NVTETensor cu_seqlens_q,
    const NVTETensor cu_seqlens_kv, const NVTETensor cu_seqlens_q_padded,
    const NVTETensor cu_seqlens_kv_padded, size_t max_seqlen_q, size_t max_seqlen_kv,
    float attn_scale, float dropout, NVTE_QKV_Layout qkv_layout, NVTE_Bias_Type bias_type,
    NVTE_Mask_Type attn_mask_type, NVTE_Softmax_Type softmax_type, int64_t window_size_left,
    int64_t window_size_right, bool bottom_right_diagonal, bool deterministic, bool /*cuda_graph*/,
    NVTETensor workspace, cudaStream_t stream) {
  TEA_NVTE_EXPORTED({
    const Views views = views_of_kv("KV", "Q", Q, KV, qkv_layout);
    const Views gradients = views_of_kv("dKV", "dQ", dQ, dKV, qkv_layout);
    BackwardCall call{};
    call.options = {qkv_layout,       bias_type,         attn_mask_type,        softmax_type,
                    window_size_left, window_size_right, bottom_right_diagonal, attn_scale,
                    dropout};
    call.options.training = true, call.options.deterministic = deterministic;
    call.max_q = signed_size(max_seqlen_q), call.max_kv = signed_size(max_seqlen_kv);
    set_inputs(call, views);
    set_gradients(call, gradients);
    call.s = &TEA_TENSOR(S), call.o = &TEA_TENSOR(O), call.dout = &TEA_TENSOR(dO),
    call.dp = &TEA_TENSOR(dP);
    call.dbias = &TEA_TENSOR(dBias), call.dsoftmax_offset = &TEA_TENSOR(dSoftmaxOffset);
    call.cu_seqlens_q = &TEA_TENSOR(cu_seqlens_q), call.cu_seqlens_kv = &TEA_TENSOR(cu_seqlens_kv);
    call.cu_seqlens_q_padded = &TEA_TENSOR(cu_seqlens_q_padded);
    call.cu_seqlens_kv_padded = &TEA_TENSOR(cu_seqlens_kv_padded);
    call.workspace = &TEA_TENSOR(workspace), call.stream = stream;
    enter(call, needed_pack(Aux_CTX_Tensors));
  });
}

// NOLINTEND(readability-function-size)
