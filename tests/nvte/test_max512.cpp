// The backend for short sequences, which NVTE_FUSED_ATTN_BACKEND=0 selects.
#include <gtest/gtest.h>

#include <cstdlib>

#include "nvte/attention_call.h"
#include "nvte/expect_error.h"

namespace tea::test {
namespace {

const int kVariable = setenv("NVTE_FUSED_ATTN_BACKEND", "0", 1);

Question short_question() {
  Question s;
  s.max_q = s.max_kv = s.dim_qk = s.dim_v = 64;
  return s;
}

TEST(Max512, IsSelectedWhereItsRulesHold) {
  ASSERT_EQ(kVariable, 0);
  const auto backend = [](const Question& s) { return AttentionCall(s).backend(); };
  Question s = short_question();
  for (int i = 0; i < kLayouts; ++i) {
    s.layout = static_cast<NVTE_QKV_Layout>(i), s.mask = NVTE_PADDING_MASK;
    const bool listed = i == NVTE_SB3HD || i == NVTE_BS3HD || i == NVTE_SBHD_SB2HD ||
                        i == NVTE_BSHD_BS2HD || i == NVTE_BSHD_BSHD_BSHD;
    s.training = !s.order().paged;
    EXPECT_EQ(backend(s), listed ? NVTE_F16_max512_seqlen : NVTE_F16_arbitrary_seqlen) << i;
  }
  const struct {
    const char* what;
    void (*change)(Question&);
  } rows[] = {{"length", [](Question& q) { q.max_q = 65; }},
              {"long", [](Question& q) { q.max_kv = 576; }},
              {"empty", [](Question& q) { q.max_q = 0; }},
              {"head dim", [](Question& q) { q.dim_qk = 32; }},
              {"heads", [](Question& q) { q.gqa = true; }},
              {"bias", [](Question& q) { q.bias = NVTE_PRE_SCALE_BIAS; }},
              {"alibi", [](Question& q) { q.bias = NVTE_ALIBI; }},
              {"softmax", [](Question& q) { q.softmax = NVTE_OFF_BY_ONE_SOFTMAX; }},
              {"maxima", [](Question& q) { q.max_logit = true; }},
              {"window", [](Question& q) { q.window_left = 3; }},
              {"mask", [](Question& q) { q.mask = NVTE_CAUSAL_BOTTOM_RIGHT_MASK; }},
              {"type", [](Question& q) { q.type = DType::kFloat32; }}};
  for (const auto& row : rows) {
    Question changed = short_question();
    EXPECT_EQ(backend(changed), NVTE_F16_max512_seqlen);
    row.change(changed);
    EXPECT_EQ(backend(changed), NVTE_F16_arbitrary_seqlen) << row.what;
  }
}

// As in TransformerEngine, whose callers set the variable between two calls.
TEST(Max512, TheVariableIsReadAtEachSelection) {
  const AttentionCall call(short_question());
  EXPECT_EQ(call.backend(), NVTE_F16_max512_seqlen);
  for (const char* other : {"1", ""}) {
    setenv("NVTE_FUSED_ATTN_BACKEND", other, 1);
    EXPECT_EQ(call.backend(), NVTE_F16_arbitrary_seqlen) << other;
  }
  unsetenv("NVTE_FUSED_ATTN_BACKEND");
  EXPECT_EQ(call.backend(), NVTE_F16_arbitrary_seqlen);
  setenv("NVTE_FUSED_ATTN_BACKEND", "0", 1);
  EXPECT_EQ(call.backend(), NVTE_F16_max512_seqlen);
}

// One opaque tensor carries the LSE and the state of the random numbers: backward gets no other.
TEST(Max512, ForwardAndBackwardMatchTheOracle) {
  for (const NVTE_Mask_Type mask : {NVTE_NO_MASK, NVTE_CAUSAL_MASK, NVTE_PADDING_CAUSAL_MASK}) {
    Question s = short_question();
    s.mask = mask, s.dropout = 0.25f, s.layout = NVTE_BS3HD;
    AttentionCall call(s);
    call.forward();
    ASSERT_EQ(call.pack.size, 1u);
    const NVTEShape shape = nvte_tensor_shape(call.pack.tensors[0]);
    EXPECT_EQ(std::vector<size_t>(shape.data, shape.data + shape.ndim),
              (std::vector<size_t>{3, 4, 64, 64}));
    EXPECT_EQ(nvte_tensor_type(call.pack.tensors[0]), kNVTEBFloat16);
    Mismatches m = call.check_forward(call.solve());
    // Past the tensor nothing is written.
    const std::vector<char>& memory = call.aux_memory[0];
    EXPECT_EQ(std::string(memory.end() - 64, memory.end()), std::string(64, '\xff'));
    call.keep_o();
    call.rng.assign(2, 0);  // backward has its own copy
    call.backward();
    m += call.check_backward(call.solve());
    EXPECT_GT(m.compared, 0);
    EXPECT_EQ(m.wrong, 0) << m.first;
  }
}

// The bias is a second tensor of the pack, which backward reads: in the place that the query says,
// or, as TransformerEngine's callers have it, after a rng_state.
TEST(Max512, APostScaleBiasIsOffered) {
  for (const NVTE_Mask_Type mask : {NVTE_NO_MASK, NVTE_PADDING_MASK, NVTE_PADDING_CAUSAL_MASK}) {
    for (const bool as_torch : {false, true}) {
      Question s = short_question();
      s.mask = mask, s.dropout = 0.25f, s.bias = NVTE_POST_SCALE_BIAS;
      AttentionCall call(s);
      EXPECT_EQ(call.backend(), NVTE_F16_max512_seqlen);
      call.forward();
      ASSERT_EQ(call.pack.size, 2u);
      Mismatches m = call.check_forward(call.solve());
      call.keep_o();
      if (as_torch) {
        std::swap(call.pack.tensors[1], call.pack.tensors[2]);
        const NVTEBasicTensor state = {call.rng.data(), kNVTEInt64, {{2}, 1}};
        nvte_set_tensor_param(&call.pack.tensors[1], kNVTERowwiseData, &state);
        call.pack.size = 3;
      }
      call.backward();
      m += call.check_backward(call.solve());
      EXPECT_GT(m.compared, 0);
      EXPECT_EQ(m.wrong, 0) << m.first;
    }
  }
}

// A forward that returned the maxima was of the other class, and so is its backward.
TEST(Max512, BackwardTakesThePackOfTheOtherClass) {
  Question s = short_question();
  s.max_logit = true, s.dropout = 0.25f;
  AttentionCall call(s);
  call.forward();
  ASSERT_EQ(call.pack.size, 3u);
  // As PyTorch does: one LSE from both, then what follows.
  std::vector<float> lse(3 * 4 * 64);
  for (size_t i = 0; i < lse.size(); ++i)
    lse[i] = call.aux_floats(0)[i] + std::log(call.aux_floats(1)[i]);
  const NVTEBasicTensor stats = {lse.data(), kNVTEFloat32, {{3, 4, 64, 1}, 4}};
  const NVTEBasicTensor state = {call.rng.data(), kNVTEInt64, {{2}, 1}};
  nvte_set_tensor_param(&call.pack.tensors[0], kNVTERowwiseData, &stats);
  nvte_set_tensor_param(&call.pack.tensors[1], kNVTERowwiseData, &state);
  call.keep_o();
  call.backward();
  const Mismatches m = call.check_backward(call.solve());
  EXPECT_GT(m.compared, 0);
  EXPECT_EQ(m.wrong, 0) << m.first;
}

TEST(Max512, ThePackHasExactlyOneTensor) {
  AttentionCall call(short_question());
  call.call_forward();
  call.give_memory();
  call.pack.size = 2;
  EXPECT_NVTE_ERROR(call.call_forward(), "Unexpected Aux_CTX_Tensors->size.");
}

}  // namespace
}  // namespace tea::test
