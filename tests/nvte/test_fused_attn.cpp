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
  s.dim_qk = 12;
  expect_forward_error(s,
                       "Invalid combination of data type and sequence length for fused attention.");
  expect_forward_error(s, "dim_qk is 12; needs a multiple of 8");
  s = {}, s.dropout = 1.0f;
  expect_forward_error(s, "dropout is 1; needs at least 0 and below 1");
  s = {}, s.type = DType::kFloat8E4M3, s.o_type = DType::kFloat32;
  expect_forward_error(s,
                       "FP8 fused attention only supports O tensor in kFloat16, kBFloat16, "
                       "kFloat8E4M3 or kFloat8E5M2!");
}

TEST(FusedAttnErrors, TypesThatDiffer) {
  AttentionCall call({});
  call.k.buffer = std::make_shared<Buffer>(DType::kFloat16, call.k.buffer->elements());
  EXPECT_NVTE_ERROR(call.forward(),
                    "Q and KV must have the same data type. That of KV is 5; needs that of Q, "
                    "which is 6.");
}

// MXFP8 keeps an exponent for every 32 elements: read as one number it gives garbage.
TEST(FusedAttnErrors, Fp8ThatIsNotScaledByOneNumberPerTensor) {
  Question s;
  s.type = DType::kFloat8E4M3;
  AttentionCall call(s);
  uint8_t exponents[64] = {};
  const auto mxfp8 = [&](const Stored& t) {
    return TensorWrapper(t.data(), t.shape, s.type, nullptr, nullptr,
                         reinterpret_cast<float*>(exponents), std::vector<size_t>{4, 1},
                         NVTE_MXFP8_1D_SCALING);
  };
  const auto message = [](const char* name) {
    return std::string("scaling_mode of ") + name + " is 1; needs 0, NVTE_DELAYED_TENSOR_SCALING";
  };
  const struct {
    const char* name;
    TensorWrapper ForwardHandles::*member;
    const Stored* like;
  } inputs[] = {{"Q", &ForwardHandles::q, &call.q},
                {"K", &ForwardHandles::k, &call.k},
                {"V", &ForwardHandles::v, &call.v},
                {"S", &ForwardHandles::s, &call.q},
                {"O", &ForwardHandles::o, &call.o}};
  for (const auto& row : inputs) {
    ForwardHandles h = call.forward_handles();
    h.*row.member = mxfp8(*row.like);
    EXPECT_NVTE_ERROR(call.run(h, nullptr), message(row.name));
  }
  const struct {
    const char* name;
    TensorWrapper BackwardHandles::*member;
    const Stored* like;
  } outputs[] = {{"Q", &BackwardHandles::q, &call.q},     {"K", &BackwardHandles::k, &call.k},
                 {"V", &BackwardHandles::v, &call.v},     {"O", &BackwardHandles::o, &call.o},
                 {"dO", &BackwardHandles::dout, &call.o}, {"S", &BackwardHandles::s, &call.q},
                 {"dP", &BackwardHandles::dp, &call.q},   {"dQ", &BackwardHandles::dq, &call.dq},
                 {"dK", &BackwardHandles::dk, &call.dk},  {"dV", &BackwardHandles::dv, &call.dv}};
  for (const auto& row : outputs) {
    BackwardHandles h = call.backward_handles();
    h.*row.member = mxfp8(*row.like);
    EXPECT_NVTE_ERROR(call.run(h, nullptr), message(row.name));
  }
  ForwardHandles h = call.forward_handles();
  h.k.set_rowwise_scale_inv(exponents, DType::kFloat8E8M0, std::vector<size_t>{1});
  EXPECT_NVTE_ERROR(call.run(h, nullptr), "dtype of scale_inv of K is 9; needs 4, kNVTEFloat32");
}

// int64, as PyTorch makes lengths by default, would be read as other lengths.
TEST(FusedAttnErrors, IntegersOfAnotherType) {
  Question s;
  s.layout = NVTE_THD_THD_THD, s.mask = NVTE_PADDING_MASK, s.dropout = 0.25f;
  AttentionCall call(s);
  std::vector<int64_t> wide(4);
  const auto labelled = [&](DType type, const std::vector<size_t>& shape) {
    return TensorWrapper(wide.data(), shape, type);
  };
  const struct {
    const char* name;
    TensorWrapper ForwardHandles::*forward;
    TensorWrapper BackwardHandles::*backward;
  } lengths[] = {{"cu_seqlens_q", &ForwardHandles::cu_q, &BackwardHandles::cu_q},
                 {"cu_seqlens_kv", &ForwardHandles::cu_kv, &BackwardHandles::cu_kv},
                 {"cu_seqlens_q_padded", &ForwardHandles::starts_q, &BackwardHandles::starts_q},
                 {"cu_seqlens_kv_padded", &ForwardHandles::starts_kv, &BackwardHandles::starts_kv}};
  for (const auto& row : lengths) {
    const std::string message = std::string("dtype of ") + row.name + " is 3; needs 2, kNVTEInt32";
    ForwardHandles f = call.forward_handles();
    f.*row.forward = labelled(DType::kInt64, {4});
    EXPECT_NVTE_ERROR(call.run(f, nullptr), message);
    BackwardHandles b = call.backward_handles();
    b.*row.backward = labelled(DType::kInt64, {4});
    EXPECT_NVTE_ERROR(call.run(b, nullptr), message);
  }
  ForwardHandles f = call.forward_handles();
  f.rng = labelled(DType::kInt32, {2});
  EXPECT_NVTE_ERROR(call.run(f, nullptr), "dtype of rng_state is 2; needs 3, kNVTEInt64");

  s.layout = NVTE_Paged_KV_BSHD_BSHD_BSHD, s.dropout = 0, s.training = false;
  AttentionCall paged(s);
  const std::vector<size_t> table = {3, static_cast<size_t>(paged.columns)};
  f = paged.forward_handles();
  f.table_k = labelled(DType::kInt64, table);
  EXPECT_NVTE_ERROR(paged.run(f, nullptr), "dtype of page_table_k is 3; needs 2, kNVTEInt32");
  f = paged.forward_handles();
  f.table_v = labelled(DType::kInt64, table);
  EXPECT_NVTE_ERROR(paged.run(f, nullptr), "dtype of page_table_v is 3; needs 2, kNVTEInt32");
}

// Integers that are not read may be labelled as anything.
TEST(FusedAttnProtocol, IntegersThatAreNotReadMayBeLabelledAnything) {
  Question s;
  s.training = false, s.dropout = 0.5f;
  AttentionCall call(s);
  const auto odd = [&](size_t n) {
    return TensorWrapper(call.cu_q.data(), std::vector<size_t>{n}, DType::kFloat16);
  };
  const auto run = [&] {
    ForwardHandles h = call.forward_handles();
    h.cu_q = odd(4), h.cu_kv = odd(1), h.starts_q = odd(4), h.table_k = odd(1), h.rng = odd(1);
    call.run(h, nullptr);
  };
  run();
  call.give_memory();
  run();
  const Mismatches m = call.check_forward(call.solve());
  EXPECT_GT(m.compared, 0);
  EXPECT_EQ(m.wrong, 0) << m.first;
}

// Errors in host memory are reported when the call returns.
TEST(FusedAttnErrors, InvalidLengthsOnTheHost) {
  const char* const message =
      "cu_seqlens_q or cu_seqlens_kv is out of range in part; needs lengths";
  const auto refuse = [&](const std::vector<int32_t>& cu) {
    Question s;
    s.mask = NVTE_PADDING_MASK;
    AttentionCall call(s);
    call.forward();
    call.cu_q = cu;
    call.call_forward();
  };
  EXPECT_NVTE_ERROR(refuse({0, 1000, 1002, 1004}), message);
  EXPECT_NVTE_ERROR(refuse({5, -3, 0, 2}), message);
  Question s;
  s.mask = NVTE_PADDING_MASK;
  AttentionCall call(s);
  call.forward();
  call.keep_o();
  call.backward();
  call.cu_kv[1] = 1000;
  EXPECT_NVTE_ERROR(call.backward(), message);
  s.layout = NVTE_Paged_KV_BSHD_BSHD_BSHD, s.training = false;
  AttentionCall paged(s);
  paged.table_v[0] = static_cast<int32_t>(paged.pages);
  EXPECT_NVTE_ERROR(paged.forward(), "page_table_k or page_table_v is out of range in part");
}

// JAX has many sequences without tokens past the last one; they start where the buffer ends.
TEST(FusedAttnProtocol, SequencesWithoutTokensMayStartAtTheEnd) {
  Question s;
  s.layout = NVTE_THD_THD_THD, s.mask = NVTE_PADDING_CAUSAL_MASK;
  AttentionCall call(s);
  call.cu_q = {0, 5, 5, 5}, call.cu_kv = {0, 5, 5, 5};
  const auto end_q = static_cast<int32_t>(call.tokens_q);
  const auto end_kv = static_cast<int32_t>(call.tokens_kv);
  call.starts_q = {0, end_q, end_q, end_q}, call.starts_kv = {0, end_kv, end_kv, end_kv};
  EXPECT_NO_THROW(call.forward());
  EXPECT_NO_THROW(call.backward());
}

TEST(FusedAttnErrors, ShapesOfGradients) {
  AttentionCall call({});
  const struct {
    const char* name;
    TensorWrapper BackwardHandles::*member;
    const Stored* tensor;
  } rows[] = {{"dO", &BackwardHandles::dout, &call.dout},
              {"dQ", &BackwardHandles::dq, &call.dq},
              {"dK", &BackwardHandles::dk, &call.dk},
              {"dV", &BackwardHandles::dv, &call.dv}};
  for (const auto& row : rows) {
    const std::vector<size_t>& shape = row.tensor->shape;
    for (const size_t i : {0, 1, 2, 3}) {
      std::vector<size_t> less = shape;
      --less[i];
      BackwardHandles h = call.backward_handles();
      h.*row.member = TensorWrapper(row.tensor->data(), less, DType::kBFloat16);
      EXPECT_NVTE_ERROR(call.run(h, nullptr), std::string("shape of ") + row.name + " is [" +
                                                  std::to_string(less[0]) + ", ");
    }
  }
  BackwardHandles h = call.backward_handles();
  h.dq = TensorWrapper(call.dq.data(), std::vector<size_t>{1, 1, 1, 1}, DType::kBFloat16);
  EXPECT_NVTE_ERROR(call.run(h, nullptr),
                    "shape of dQ is [1, 1, 1, 1]; needs [..., 4, 8] with 15 rows");
}

TEST(FusedAttnErrors, AMisalignedTensorIsNamed) {
  AttentionCall call({});
  call.forward();
  ForwardHandles h = call.forward_handles();
  h.k = TensorWrapper(call.k.data() + 1, call.k.shape, DType::kBFloat16);
  EXPECT_NVTE_ERROR(call.run(h, nullptr),
                    "the address of K is a multiple of 1 bytes only; needs a multiple of 2, the "
                    "size of an element");
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
void expect_every_handle_needed(const std::string& function, const std::vector<std::string>& names,
                                std::vector<NVTETensor> handles, const Call& call) {
  EXPECT_NO_THROW(call(handles.data()));
  ASSERT_EQ(names.size(), handles.size());
  for (size_t i = 0; i < handles.size(); ++i) {
    const NVTETensor kept = handles[i];
    handles[i] = nullptr;
    EXPECT_NVTE_ERROR(call(handles.data()), "in function " + function + ": Invalid tensor. " +
                                                names[i] + " is NULL; needs the handle");
    handles[i] = kept;
  }
}

TEST(FusedAttnErrors, EveryHandleIsNeeded) {
  const TensorWrapper t(nullptr, std::vector<size_t>{2, 5, 4, 16}, DType::kBFloat16), none,
      lengths(nullptr, std::vector<size_t>{3}, DType::kInt32), sizes;
  NVTETensorPack pack;
  nvte_tensor_pack_create(&pack);
  const NVTETensor x = t.data(), e = none.data(), cu = lengths.data(), w = sizes.data();
  expect_every_handle_needed(
      "nvte_fused_attn_fwd",
      {"Q", "K", "V", "Bias", "SoftmaxOffset", "S", "O", "cu_seqlens_q", "cu_seqlens_kv",
       "cu_seqlens_q_padded", "cu_seqlens_kv_padded", "page_table_k", "page_table_v", "rng_state",
       "workspace"},
      {x, x, x, e, e, e, x, cu, cu, e, e, e, e, e, w}, [&pack](const NVTETensor* h) {
        nvte_fused_attn_fwd(h[0], h[1], h[2], h[3], h[4], h[5], h[6], &pack, h[7], h[8], h[9],
                            h[10], h[11], h[12], h[13], 5, 5, true, false, false, 1, 0,
                            NVTE_BSHD_BSHD_BSHD, NVTE_NO_BIAS, NVTE_NO_MASK, NVTE_VANILLA_SOFTMAX,
                            -1, -1, false, h[14], nullptr);
      });
  expect_every_handle_needed(
      "nvte_fused_attn_bwd",
      {"Q", "K", "V", "O", "dO", "S", "dP", "dQ", "dK", "dV", "dBias", "dSoftmaxOffset",
       "cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded", "workspace"},
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
