// The main entry points as callers use them: the two calls, what JAX and PyTorch do with handles
// and packs, the short call of the documentation, and the errors.
#include <gtest/gtest.h>

#include "nvte/attention_call.h"
#include "nvte/expect_error.h"
#include "transformer_engine/fused_attn.h"

namespace tea::test {
namespace {

std::vector<size_t> shape_of(NVTETensor tensor) {
  const NVTEShape shape = nvte_tensor_shape(tensor);
  return {shape.data, shape.data + shape.ndim};
}

TEST(FusedAttnProtocol, FirstCallSizesAndWritesNothing) {
  AttentionCall call({});
  call.call_forward();
  EXPECT_EQ(call.workspace->dtype(), DType::kByte);
  EXPECT_EQ(call.workspace->ndim(), 1u);
  EXPECT_GE(call.workspace->numel(), 1u);
  EXPECT_EQ(call.workspace->dptr(), nullptr);
  EXPECT_EQ(call.pack.size, 2u);
  EXPECT_TRUE(std::isnan(call.o.load(0, 0, 0, 0)));
}

// JAX asks once per number of segments and keeps the pack.
TEST(FusedAttnProtocol, TheQueryMayBeRepeatedWithTheSamePack) {
  AttentionCall call({});
  call.call_forward();
  const size_t bytes = call.workspace->numel();
  call.call_forward();
  EXPECT_EQ(call.workspace->numel(), bytes);
  EXPECT_EQ(call.pack.size, 2u);
  call.give_memory();
  call.call_forward();
  const Mismatches m = call.check_forward(call.solve());
  EXPECT_GT(m.compared, 0);
  EXPECT_EQ(m.wrong, 0) << m.first;
}

// A query at trace time has shapes but no memory at all.
TEST(FusedAttnProtocol, TheQueryNeedsNoPointer) {
  Question s;
  s.layout = NVTE_THD_THD_THD, s.mask = NVTE_PADDING_CAUSAL_MASK;
  const std::vector<size_t> q = {20, 4, 16}, cu = {6}, one = {1}, two = {2};
  TensorWrapper wq(nullptr, q, DType::kBFloat16), none, s_(nullptr, one, DType::kFloat32);
  TensorWrapper wcu(nullptr, cu, DType::kInt32), rng(nullptr, two, DType::kInt64);
  // JAX labels O with the shape of Q, whatever the head dim of V is.
  TensorWrapper wv(nullptr, std::vector<size_t>{20, 4, 8}, DType::kBFloat16), workspace;
  NVTETensorPack pack;
  nvte_tensor_pack_create(&pack);
  nvte_fused_attn_fwd(wq.data(), wq.data(), wv.data(), none.data(), none.data(), s_.data(),
                      wq.data(), &pack, wcu.data(), wcu.data(), wcu.data(), wcu.data(), none.data(),
                      none.data(), rng.data(), 9, 9, true, false, false, 1.0f, 0.1f, s.layout,
                      s.bias, s.mask, s.softmax, -1, -1, false, workspace.data(), nullptr);
  EXPECT_EQ(shape_of(pack.tensors[0]), (std::vector<size_t>{20, 4, 1}));
  EXPECT_GE(workspace.numel(), 1u);
  TensorWrapper bwd_workspace;
  nvte_fused_attn_bwd(wq.data(), wq.data(), wv.data(), wv.data(), wv.data(), s_.data(), s_.data(),
                      &pack, wq.data(), wq.data(), wv.data(), none.data(), none.data(), wcu.data(),
                      wcu.data(), wcu.data(), wcu.data(), 9, 9, 1.0f, 0.1f, s.layout, s.bias,
                      s.mask, s.softmax, -1, -1, false, true, false, bwd_workspace.data(), nullptr);
  EXPECT_GE(bwd_workspace.numel(), 1u);
  nvte_tensor_pack_destroy(&pack);
}

TEST(FusedAttnProtocol, TheWorkspaceIsOneByteAfterwardsAndMayBeUsedAgain) {
  AttentionCall call({});
  call.forward();
  EXPECT_EQ(shape_of(call.workspace->data()), std::vector<size_t>{1});
  EXPECT_EQ(call.workspace->dtype(), DType::kByte);
  call.call_forward();
  const Mismatches m = call.check_forward(call.solve());
  EXPECT_GT(m.compared, 0);
  EXPECT_EQ(m.wrong, 0) << m.first;
}

TEST(FusedAttnProtocol, AWorkspaceThatIsTooSmallIsRefused) {
  Question s;
  s.max_logit = true;  // so that something is needed on any engine
  AttentionCall call(s);
  call.call_forward();
  ASSERT_GT(call.workspace->numel(), 2u);
  call.give_memory();
  call.workspace->set_rowwise_data(call.workspace->dptr(), DType::kByte, std::vector<size_t>{2});
  EXPECT_NVTE_ERROR(call.call_forward(), "workspace is 2 bytes; needs at least");
}

// The entries for rng_state and the inputs arrive holding anything; JAX's hold unrelated pointers.
TEST(FusedAttnProtocol, ExecutionPointsEntriesAtTheInputsAndIgnoresLabels) {
  Question s;
  s.bias = NVTE_POST_SCALE_BIAS, s.softmax = NVTE_LEARNABLE_SOFTMAX, s.dropout = 0.25f;
  AttentionCall call(s);
  call.call_forward();
  call.give_memory();
  char unrelated = 0;
  for (size_t i = 1; i < 4; ++i) {
    const NVTEBasicTensor odd = {&unrelated, kNVTEInt64, {{0, 0}, 2}};
    nvte_set_tensor_param(&call.pack.tensors[i], kNVTERowwiseData, &odd);
  }
  call.pack.size = 2;  // JAX's pack holds more entries than it says
  call.call_forward();
  Mismatches m = call.check_forward(call.solve());
  EXPECT_EQ(nvte_tensor_data(call.pack.tensors[1]), call.rng.data());
  EXPECT_EQ(nvte_tensor_data(call.pack.tensors[2]), call.bias.data());
  EXPECT_EQ(nvte_tensor_data(call.pack.tensors[3]), call.sink.data());
  call.keep_o();
  call.backward();
  m += call.check_backward(call.solve());
  EXPECT_EQ(m.wrong, 0) << m.first;
}

// JAX's backward puts a bias entry before the softmax offset even where there is no bias.
TEST(FusedAttnProtocol, BackwardFindsTheSoftmaxOffsetBehindADummyBias) {
  for (const bool dummy_has_memory : {false, true}) {
    Question s;
    s.softmax = NVTE_LEARNABLE_SOFTMAX;
    AttentionCall call(s);
    call.forward();
    float dummy[64] = {};
    const NVTEBasicTensor bias = {
        dummy_has_memory ? dummy : nullptr, kNVTEBFloat16, {{0, 0, 5, 7}, 4}};
    const NVTEBasicTensor offset = {call.sink.data(), kNVTEFloat32, {{1, 4, 1, 1}, 4}};
    nvte_set_tensor_param(&call.pack.tensors[2], kNVTERowwiseData, &bias);
    nvte_set_tensor_param(&call.pack.tensors[3], kNVTERowwiseData, &offset);
    call.keep_o();
    call.backward();
    const Mismatches m = call.check_backward(call.solve());
    EXPECT_GT(m.compared, 0);
    EXPECT_EQ(m.wrong, 0) << m.first;
  }
}

// JAX passes [batch * seqlen, heads, head dim] whatever the layout.
TEST(FusedAttnProtocol, TheNumberOfDimensionsSaysNothing) {
  for (const NVTE_QKV_Layout layout : {NVTE_BSHD_BSHD_BSHD, NVTE_BS3HD, NVTE_SBHD_SB2HD}) {
    Question s;
    s.layout = layout, s.mask = NVTE_PADDING_MASK;
    AttentionCall call(s);
    for (Stored* t : {&call.q, &call.k, &call.v, &call.dq, &call.dk, &call.dv})
      t->shape = {t->shape[0] * t->shape[1], t->shape[2], t->shape[3]};
    call.o.shape = call.q.shape;
    call.forward();
    Mismatches m = call.check_forward(call.solve());
    call.keep_o();
    call.backward();
    m += call.check_backward(call.solve());
    EXPECT_GT(m.compared, 0);
    EXPECT_EQ(m.wrong, 0) << kLayoutNames[layout] << " " << m.first;
  }
}

// Without padding the lengths are not read: only their number counts.
TEST(FusedAttnProtocol, DenseLayoutsTakeOnlyTheBatchFromCuSeqlens) {
  AttentionCall call({});
  call.cu_q.assign(4, -77);
  call.cu_kv = {};
  call.forward();
  const Mismatches m = call.check_forward(call.solve());
  EXPECT_EQ(m.wrong, 0) << m.first;
}

TEST(FusedAttnProtocol, AnEmptyBatchNeedsNoMemory) {
  const TensorWrapper t(nullptr, std::vector<size_t>{0, 5, 4, 16}, DType::kBFloat16), none,
      lengths(nullptr, std::vector<size_t>{1}, DType::kInt32);
  TensorWrapper workspace;
  NVTETensorPack pack;
  nvte_tensor_pack_create(&pack);
  char memory[1024];
  for (int phase = 0; phase < 2; ++phase) {
    nvte_fused_attn_fwd(t.data(), t.data(), t.data(), none.data(), none.data(), t.data(), &pack,
                        lengths.data(), lengths.data(), none.data(), 5, 5, true, 1.0f, 0.0f,
                        NVTE_BSHD_BSHD_BSHD, NVTE_NO_BIAS, NVTE_NO_MASK, -1, -1, workspace.data(),
                        nullptr);
    EXPECT_EQ(shape_of(pack.tensors[0]), (std::vector<size_t>{0, 4, 5, 1}));
    ASSERT_LE(workspace.numel(), sizeof memory);
    workspace.set_rowwise_data(memory, DType::kByte, workspace.shape());
  }
  nvte_tensor_pack_destroy(&pack);
}

// The call of the documentation, with its 22 arguments.
TEST(FusedAttnDocumentation, TheShortCallWorks) {
  Question question;
  question.layout = NVTE_BS3HD, question.mask = NVTE_CAUSAL_MASK;
  AttentionCall call(question);
  const auto wrap = [](const Stored& t) {
    return TensorWrapper(t.data(), t.shape, t.buffer->type());
  };
  TensorWrapper q_ = wrap(call.q), k_ = wrap(call.k), v_ = wrap(call.v), o_ = wrap(call.o), empty;
  TensorWrapper cu_q(call.cu_q.data(), std::vector<size_t>{4}, DType::kInt32);
  TensorWrapper cu_kv(call.cu_kv.data(), std::vector<size_t>{4}, DType::kInt32);
  TensorWrapper state(call.rng.data(), std::vector<size_t>{2}, DType::kInt64);
  const NVTETensor Q = q_.data(), K = k_.data(), V = v_.data(), Bias = empty.data(),
                   S = empty.data(), O = o_.data(), cu_seqlens_q = cu_q.data(),
                   cu_seqlens_kv = cu_kv.data(), rng_state = state.data();
  NVTETensorPack& aux_ctx = call.pack;
  const size_t max_seqlen_q = 5, max_seqlen_kv = 5;
  const auto attn_scale = static_cast<float>(call.c.scale);
  const float dropout_prob = 0;
  const NVTETensor workspace = call.workspace->data();
  const cudaStream_t stream = nullptr;
  for (int phase = 0; phase < 2; ++phase) {
    nvte_fused_attn_fwd(Q, K, V, Bias, S, O, &aux_ctx, cu_seqlens_q, cu_seqlens_kv, rng_state,
                        max_seqlen_q, max_seqlen_kv,
                        /*is_training=*/true, attn_scale, dropout_prob, NVTE_BS3HD, NVTE_NO_BIAS,
                        NVTE_CAUSAL_MASK,
                        /*window_left=*/-1, /*window_right=*/0, workspace, stream);
    if (phase == 0) call.give_memory();
  }
  const Mismatches m = call.check_forward(call.solve());
  EXPECT_GT(m.compared, 0);
  EXPECT_EQ(m.wrong, 0) << m.first;
}

void expect_forward_error(const Question& s, const std::string& message) {
  AttentionCall call(s);
  EXPECT_NVTE_ERROR(call.forward(), message);
}

TEST(FusedAttnErrors, TheDocumentedTexts) {
  Question s;
  s.layout = NVTE_THD_THD_THD, s.mask = NVTE_CAUSAL_MASK;
  expect_forward_error(s, "Ragged QKV input requires padding or padding_causal mask!");
  s.layout = NVTE_Paged_KV_BSHD_BSHD_BSHD, s.training = false;
  expect_forward_error(s, "Paged attention requires padding mask!");
  s = {}, s.dim_qk = 12;
  expect_forward_error(s,
                       "Invalid combination of data type and sequence length for fused attention.");
  expect_forward_error(s, "dim_qk is 12; needs a multiple of 8");
  s = {}, s.dropout = 1.0f;
  expect_forward_error(s, "dropout is 1.000000; needs at least 0 and below 1");
  s = {}, s.type = DType::kFloat8E4M3, s.o_type = DType::kFloat32;
  expect_forward_error(s,
                       "FP8 fused attention only supports O tensor in kFloat16, kBFloat16, "
                       "kFloat8E4M3 or kFloat8E5M2!");
}

TEST(FusedAttnErrors, TypesThatDiffer) {
  AttentionCall call({});
  call.k.buffer = std::make_shared<Buffer>(DType::kFloat16, call.k.buffer->elements());
  EXPECT_NVTE_ERROR(call.forward(), "Q and KV must have the same data type.");
}

TEST(FusedAttnErrors, APackOfTheWrongSize) {
  AttentionCall call({});
  call.call_forward();
  call.give_memory();
  call.pack.size = 1;
  EXPECT_NVTE_ERROR(call.call_forward(), "Unexpected Aux_CTX_Tensors->size.");
}

// Calls with every handle valid, then with each one absent.
template <class Call>
void expect_every_handle_needed(std::vector<NVTETensor> handles, const Call& call) {
  EXPECT_NO_THROW(call(handles.data()));
  for (NVTETensor& handle : handles) {
    const NVTETensor kept = handle;
    handle = nullptr;
    EXPECT_NVTE_ERROR(call(handles.data()), "Invalid tensor.");
    handle = kept;
  }
}

TEST(FusedAttnErrors, EveryHandleIsNeeded) {
  const TensorWrapper t(nullptr, std::vector<size_t>{2, 5, 4, 16}, DType::kBFloat16), none,
      lengths(nullptr, std::vector<size_t>{3}, DType::kInt32), sizes;
  NVTETensorPack pack;
  nvte_tensor_pack_create(&pack);
  const NVTETensor x = t.data(), e = none.data(), cu = lengths.data(), w = sizes.data();
  expect_every_handle_needed(
      {x, x, x, e, e, e, x, cu, cu, e, e, e, e, e, w}, [&pack](const NVTETensor* h) {
        nvte_fused_attn_fwd(h[0], h[1], h[2], h[3], h[4], h[5], h[6], &pack, h[7], h[8], h[9],
                            h[10], h[11], h[12], h[13], 5, 5, true, false, false, 1, 0,
                            NVTE_BSHD_BSHD_BSHD, NVTE_NO_BIAS, NVTE_NO_MASK, NVTE_VANILLA_SOFTMAX,
                            -1, -1, false, h[14], nullptr);
      });
  expect_every_handle_needed(
      {x, x, x, x, x, e, e, x, x, x, e, e, cu, cu, e, e, w}, [&pack](const NVTETensor* h) {
        nvte_fused_attn_bwd(h[0], h[1], h[2], h[3], h[4], h[5], h[6], &pack, h[7], h[8], h[9],
                            h[10], h[11], h[12], h[13], h[14], h[15], 5, 5, 1, 0,
                            NVTE_BSHD_BSHD_BSHD, NVTE_NO_BIAS, NVTE_NO_MASK, NVTE_VANILLA_SOFTMAX,
                            -1, -1, false, false, false, h[16], nullptr);
      });
  nvte_tensor_pack_destroy(&pack);
}

TEST(FusedAttnErrors, MissingMemoryIsNamed) {
  Question s;
  s.softmax = NVTE_LEARNABLE_SOFTMAX;
  AttentionCall call(s);
  call.forward();
  call.keep_o();
  for (const size_t i : {2, 3}) {
    const NVTEBasicTensor empty = {nullptr, kNVTEFloat32, {{0}, 1}};
    nvte_set_tensor_param(&call.pack.tensors[i], kNVTERowwiseData, &empty);
  }
  EXPECT_NVTE_ERROR(call.backward(), "tensor sink is NULL; needs memory");
}

TEST(FusedAttnErrors, PagedBackwardIsRefused) {
  Question s;
  s.layout = NVTE_Paged_KV_BSHD_BSHD_BSHD, s.mask = NVTE_PADDING_MASK;
  AttentionCall call(s);
  EXPECT_NVTE_ERROR(call.forward(), "training is 1; needs 0");
  EXPECT_NVTE_ERROR(call.backward(), "needs a layout without pages");
}

}  // namespace
}  // namespace tea::test
