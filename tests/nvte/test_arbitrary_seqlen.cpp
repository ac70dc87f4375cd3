// The functions of fused_attn_f16_arbitrary_seqlen.h, called as their documentation does.
#include <gtest/gtest.h>

#include "fused_attn/fused_attn_f16_arbitrary_seqlen.h"
#include "nvte/attention_call.h"
#include "nvte/expect_error.h"

namespace transformer_engine {
namespace {

using tea::test::AttentionCall;
using tea::test::Question;

class UnpackedCall : public AttentionCall {
 public:
  using AttentionCall::AttentionCall;

  // The example of the documentation; its six zeros say that there are no pages.
  void call_forward() override {
    const tea::test::ForwardHandles h = forward_handles();
    const auto object = [](const TensorWrapper& t) { return convertNVTETensorCheck(t.data()); };
    const auto size = [](int64_t n) { return static_cast<size_t>(n); };
    const size_t batch = size(c.batch), heads = size(c.heads_q), gqa_groups = size(c.heads_kv);
    const size_t max_seqlen_q = size(c.max_q), max_seqlen_kv = size(c.max_kv);
    const size_t head_dim = size(c.dim_qk), head_dim_v = size(c.dim_v);
    const size_t num_tokens_q = size(tokens_q), num_tokens_kv = size(tokens_kv);
    const bool is_training = s.training, paged = s.order().paged;
    const auto attn_scale = static_cast<float>(c.scale);
    const float dropout = s.dropout;
    const NVTE_QKV_Layout qkv_layout = s.layout;
    const NVTE_Bias_Type bias_type = s.bias;
    const NVTE_Mask_Type mask_type = s.mask;
    const NVTE_Softmax_Type softmax_type = s.softmax;
    const int64_t window_left = s.window_left, window_right = s.window_right;
    const Tensor *Q = object(h.q), *K = object(h.k), *V = object(h.v);
    const Tensor* Bias = s.has_bias() ? object(h.bias) : nullptr;
    Tensor* O = object(h.o);
    NVTETensorPack& aux = pack;
    const Tensor *cu_seqlens_q = object(h.cu_q), *cu_seqlens_kv = object(h.cu_kv);
    const Tensor* rng_state = object(h.rng);
    Tensor* const workspace_ = object(*workspace);
    const cudaStream_t stream = nullptr;
    const cudnnHandle_t handle = nullptr;
    if (!paged && !s.gaps)
      fused_attn_arbitrary_seqlen_fwd(
          batch, heads, gqa_groups, max_seqlen_q, max_seqlen_kv, head_dim, head_dim_v, num_tokens_q,
          num_tokens_kv, 0, 0, 0, 0, 0, 0, is_training, false, attn_scale, dropout, qkv_layout,
          bias_type, mask_type, softmax_type, window_left, window_right, false, Q, K, V, Bias,
          nullptr, O, &aux, cu_seqlens_q, cu_seqlens_kv, nullptr, nullptr, nullptr, nullptr,
          rng_state, workspace_, stream, handle);
    else
      fused_attn_arbitrary_seqlen_fwd(
          batch, heads, gqa_groups, max_seqlen_q, max_seqlen_kv, head_dim, head_dim_v, num_tokens_q,
          num_tokens_kv, size(pages), size(pages), size(page_size), size(page_size), size(columns),
          size(columns), is_training, s.max_logit, attn_scale, dropout, qkv_layout, bias_type,
          mask_type, softmax_type, window_left, window_right, s.bottom_right, Q, K, V, Bias,
          object(h.sink), O, &aux, cu_seqlens_q, cu_seqlens_kv, object(h.starts_q),
          object(h.starts_kv), object(h.table_k), object(h.table_v), rng_state, workspace_, stream,
          handle);
  }

  void call_backward() override {
    const tea::test::BackwardHandles h = backward_handles();
    const auto object = [](const TensorWrapper& t) { return convertNVTETensorCheck(t.data()); };
    const auto size = [](int64_t n) { return static_cast<size_t>(n); };
    const auto aux = [&](size_t i) { return convertNVTETensor(pack.tensors[i]); };
    fused_attn_arbitrary_seqlen_bwd(
        size(c.batch), size(c.heads_q), size(c.heads_kv), size(c.max_q), size(c.max_kv),
        size(c.dim_qk), size(c.dim_v), size(tokens_q), size(tokens_kv), static_cast<float>(c.scale),
        s.dropout, s.layout, s.bias, s.mask, s.softmax, s.window_left, s.window_right,
        s.bottom_right, true, object(h.q), object(h.k), object(h.v), object(h.o), object(h.dout),
        s.has_bias() ? aux(2) : nullptr,
        s.softmax == NVTE_VANILLA_SOFTMAX ? nullptr : aux(s.has_bias() ? 3 : 2), aux(0),
        object(h.dq), object(h.dk), object(h.dv), object(h.dbias), object(h.dsink), object(h.cu_q),
        object(h.cu_kv), object(h.starts_q), object(h.starts_kv), aux(1), object(*workspace),
        nullptr, nullptr);
  }
};

void expect_match(const Question& s) {
  UnpackedCall call(s);
  call.forward();
  auto m = call.check_forward(call.solve());
  if (s.training) {
    call.keep_o();
    call.backward();
    m += call.check_backward(call.solve());
  }
  EXPECT_GT(m.compared, 0);
  EXPECT_EQ(m.wrong, 0) << tea::test::kLayoutNames[s.layout] << " " << m.first;
}

TEST(ArbitrarySeqlen, TheDocumentedCallMatchesTheOracle) {
  Question s;
  s.gaps = false, s.mask = NVTE_CAUSAL_MASK, s.dropout = 0.25f;
  expect_match(s);
  s.bias = NVTE_POST_SCALE_BIAS;
  expect_match(s);
}

TEST(ArbitrarySeqlen, EveryLayoutMatchesTheOracle) {
  for (int i = 0; i < tea::test::kLayouts; ++i) {
    Question s;
    s.layout = static_cast<NVTE_QKV_Layout>(i), s.mask = NVTE_PADDING_CAUSAL_MASK;
    s.bias = NVTE_PRE_SCALE_BIAS, s.softmax = NVTE_LEARNABLE_SOFTMAX;
    s.training = !s.order().paged;
    expect_match(s);
  }
}

TEST(ArbitrarySeqlen, RefusesWhatTheOtherEntryPointsRefuse) {
  Question s;
  s.dim_qk = 12;
  UnpackedCall odd(s);
  EXPECT_NVTE_ERROR(odd.forward(), "dim_qk is 12; needs a multiple of 8");
  EXPECT_NVTE_ERROR(convertNVTETensorCheck(nullptr), "Invalid tensor.");
  EXPECT_EQ(convertNVTETensor(nullptr), nullptr);
  s = {}, s.type = DType::kFloat8E4M3;
  UnpackedCall fp8(s);
  EXPECT_NVTE_ERROR(fp8.forward(), "a type of 16 or 32 bits");
}

}  // namespace
}  // namespace transformer_engine
