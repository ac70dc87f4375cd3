// The packed entry points against the oracle, and what they refuse.
#include <gtest/gtest.h>

#include "nvte/attention_call.h"
#include "nvte/expect_error.h"
#include "nvte/packed.h"

#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

namespace tea::test {
namespace {

// The whole buffer behind `first`, with the number of its tensors where the letters have it.
TensorWrapper whole(const Stored& first, const std::string& letters) {
  std::vector<size_t> shape = first.shape;
  for (const char count : {'2', '3'})
    if (const size_t at = letters.find(count); at != std::string::npos)
      shape.insert(shape.begin() + static_cast<std::ptrdiff_t>(at),
                   static_cast<size_t>(count - '0'));
  return {first.data(), shape, first.buffer->type()};
}

class PackedCall : public AttentionCall {
 public:
  using AttentionCall::AttentionCall;

  void call_forward() override {
    const ForwardHandles h = forward_handles();
    const TensorWrapper packed = whole(s.order().packs_qkv() ? q : k, s.order().of_k());
    const auto max_q = static_cast<size_t>(c.max_q), max_kv = static_cast<size_t>(c.max_kv);
    const auto scale = static_cast<float>(c.scale);
    if (s.order().packs_qkv())
      nvte_fused_attn_fwd_qkvpacked(packed.data(), h.bias.data(), h.sink.data(), h.s.data(),
                                    h.o.data(), &pack, h.cu_q.data(), h.starts_q.data(),
                                    h.rng.data(), max_q, s.training, s.max_logit, false, scale,
                                    s.dropout, s.layout, s.bias, s.mask, s.softmax, s.window_left,
                                    s.window_right, s.bottom_right, workspace->data(), nullptr);
    else
      nvte_fused_attn_fwd_kvpacked(
          h.q.data(), packed.data(), h.bias.data(), h.sink.data(), h.s.data(), h.o.data(), &pack,
          h.cu_q.data(), h.cu_kv.data(), h.starts_q.data(), h.starts_kv.data(), h.table_k.data(),
          h.table_v.data(), h.rng.data(), max_q, max_kv, s.training, s.max_logit, false, scale,
          s.dropout, s.layout, s.bias, s.mask, s.softmax, s.window_left, s.window_right,
          s.bottom_right, workspace->data(), nullptr);
  }

  void call_backward() override {
    const BackwardHandles h = backward_handles();
    const bool qkv = s.order().packs_qkv();
    const TensorWrapper packed = whole(qkv ? q : k, s.order().of_k());
    const TensorWrapper gradient = whole(qkv ? dq : dk, s.order().of_k());
    const auto max_q = static_cast<size_t>(c.max_q), max_kv = static_cast<size_t>(c.max_kv);
    const auto scale = static_cast<float>(c.scale);
    if (qkv)
      nvte_fused_attn_bwd_qkvpacked(
          packed.data(), h.o.data(), h.dout.data(), h.s.data(), h.dp.data(), &pack, gradient.data(),
          h.dbias.data(), h.dsink.data(), h.cu_q.data(), h.starts_q.data(), max_q, scale, s.dropout,
          s.layout, s.bias, s.mask, s.softmax, s.window_left, s.window_right, s.bottom_right, false,
          false, workspace->data(), nullptr);
    else
      nvte_fused_attn_bwd_kvpacked(h.q.data(), packed.data(), h.o.data(), h.dout.data(), h.s.data(),
                                   h.dp.data(), &pack, h.dq.data(), gradient.data(), h.dbias.data(),
                                   h.dsink.data(), h.cu_q.data(), h.cu_kv.data(), h.starts_q.data(),
                                   h.starts_kv.data(), max_q, max_kv, scale, s.dropout, s.layout,
                                   s.bias, s.mask, s.softmax, s.window_left, s.window_right,
                                   s.bottom_right, false, false, workspace->data(), nullptr);
  }
};

TEST(Packed, EveryPackedLayoutMatchesTheOracle) {
  int layouts = 0;
  for (int i = 0; i < kLayouts; ++i) {
    Question s;
    s.layout = static_cast<NVTE_QKV_Layout>(i);
    if (!s.order().packs_kv()) continue;
    ++layouts;
    for (const NVTE_Mask_Type mask : {NVTE_CAUSAL_MASK, NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK}) {
      s.mask = mask, s.bias = NVTE_POST_SCALE_BIAS, s.softmax = NVTE_LEARNABLE_SOFTMAX;
      s.gqa = !s.order().packs_qkv();
      PackedCall call(s);
      call.forward();
      Mismatches m = call.check_forward(call.solve());
      call.keep_o();
      call.backward();
      m += call.check_backward(call.solve());
      EXPECT_GT(m.compared, 0);
      EXPECT_EQ(m.wrong, 0) << kLayoutNames[i] << " " << m.first;
    }
  }
  EXPECT_EQ(layouts, 12);
}

TEST(Packed, OtherLayoutsAreRefusedInTheDocumentedWords) {
  const TensorWrapper t;
  NVTETensorPack pack;
  const NVTETensor e = t.data();
  const auto qkv = [&](NVTE_QKV_Layout layout) {
    nvte_fused_attn_fwd_qkvpacked(e, e, e, e, e, &pack, e, e, e, 1, false, false, false, 1, 0,
                                  layout, NVTE_NO_BIAS, NVTE_NO_MASK, NVTE_VANILLA_SOFTMAX, -1, -1,
                                  false, e, nullptr);
  };
  const auto kv = [&](NVTE_QKV_Layout layout) {
    nvte_fused_attn_fwd_kvpacked(e, e, e, e, e, e, &pack, e, e, e, e, e, e, e, 1, 1, false, false,
                                 false, 1, 0, layout, NVTE_NO_BIAS, NVTE_NO_MASK,
                                 NVTE_VANILLA_SOFTMAX, -1, -1, false, e, nullptr);
  };
  EXPECT_NVTE_ERROR(qkv(NVTE_BSHD_BS2HD), "only supports H3D and 3HD layouts!");
  EXPECT_NVTE_ERROR(qkv(NVTE_BSHD_BSHD_BSHD), "only supports H3D and 3HD layouts!");
  EXPECT_NVTE_ERROR(kv(NVTE_BS3HD), "only supports HD_H2D and HD_2HD layouts!");
  EXPECT_NVTE_ERROR(kv(NVTE_Paged_KV_BSHD_BSHD_BSHD), "only supports HD_H2D and HD_2HD layouts!");
  EXPECT_NVTE_ERROR(qkv(NVTE_BS3HD), "shape of QKV is [0]; needs [..., 3, heads, head dim]");
}

TEST(Packed, TheShapeSaysWhereTheNumberOfTensorsIsNot) {
  const TensorWrapper per_head(nullptr, std::vector<size_t>{2, 5, 4, 3, 8}, DType::kBFloat16),
      per_token(nullptr, std::vector<size_t>{2, 5, 3, 4, 8}, DType::kBFloat16);
  const TensorWrapper none;
  const NVTETensor e = none.data();
  NVTETensorPack pack;
  const auto call = [&](const TensorWrapper& buffer, NVTE_QKV_Layout layout) {
    nvte_fused_attn_fwd_qkvpacked(buffer.data(), e, e, e, e, &pack, e, e, e, 5, false, false, false,
                                  1, 0, layout, NVTE_NO_BIAS, NVTE_NO_MASK, NVTE_VANILLA_SOFTMAX,
                                  -1, -1, false, e, nullptr);
  };
  EXPECT_NVTE_ERROR(call(per_head, NVTE_BS3HD),
                    "shape of QKV is [2, 5, 4, 3, 8]; needs [..., 3, heads, head dim]");
  EXPECT_NVTE_ERROR(call(per_token, NVTE_BSH3D),
                    "shape of QKV is [2, 5, 3, 4, 8]; needs [..., heads, 3, head dim]");
}

TEST(Packed, ViewsKeepTheScalesOfTheirBuffer) {
  float scale_inv = 1;
  uint8_t memory[2 * 3 * 4 * 8] = {};
  const TensorWrapper whole_buffer(memory, std::vector<size_t>{2, 4, 3, 8}, DType::kFloat8E4M3,
                                   nullptr, nullptr, &scale_inv);
  const auto view = nvte::packed_view("QKV", nvte::tensor(whole_buffer.data()), NVTE_TH3D, 2);
  EXPECT_EQ(view.data.data_ptr, memory + 16);
  EXPECT_EQ(view.scale_inv.data_ptr, &scale_inv);
  EXPECT_EQ(view.data.shape.data[0], 2u);
  EXPECT_EQ(view.data.shape.data[1], 4u);
  EXPECT_EQ(view.data.shape.data[2], 8u);
}

}  // namespace
}  // namespace tea::test
