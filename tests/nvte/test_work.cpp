// The sizes from the shapes of a call's tensors, and the shapes that are refused.
#include <gtest/gtest.h>

#include "core/error.h"
#include "nvte/expect_error.h"
#include "nvte/work.h"
#include "te_attention.h"

namespace tea::nvte {
namespace {

Tensor tensor_of(NVTEDType type, std::initializer_list<size_t> sizes) {
  Tensor t;
  t.data = {nullptr, type, make_shape(sizes.begin(), sizes.size())};
  return t;
}

struct Fixture {
  Tensor q = tensor_of(kNVTEBFloat16, {10, 4, 8}), k = tensor_of(kNVTEBFloat16, {14, 2, 8}),
         v = tensor_of(kNVTEBFloat16, {14, 2, 16}), o = tensor_of(kNVTEBFloat16, {10, 4, 8}), none,
         cu = tensor_of(kNVTEInt32, {3}), workspace, bias;
  ForwardCall call{};

  Fixture() {
    call.max_q = 5, call.max_kv = 7;
    call.q = &q, call.k = &k, call.v = &v, call.o = &o, call.s = &none;
    call.cu_seqlens_q = call.cu_seqlens_kv = &cu;
    call.cu_seqlens_q_padded = call.cu_seqlens_kv_padded = &none;
    call.bias = &bias, call.softmax_offset = call.table_k = call.table_v = call.rng_state = &none;
    call.workspace = &workspace;
  }
  std::string error() const {
    try {
      work_of(call);
      return "";
    } catch (const std::runtime_error& e) {
      return e.what();
    }
  }
};

TEST(NvteWork, SizesComeFromTheLastDimensionsAndTheBatchFromCuSeqlens) {
  const Fixture f;
  const Sizes s = work_of(f.call).sizes;
  EXPECT_EQ(s.batch, 2);
  EXPECT_EQ(s.heads_q, 4);
  EXPECT_EQ(s.heads_kv, 2);
  EXPECT_EQ(s.dim_qk, 8);
  EXPECT_EQ(s.dim_v, 16);
}

TEST(NvteWork, PagesFollowTheFormat) {
  Fixture f;
  f.call.options.mask = NVTE_PADDING_MASK;
  f.k = tensor_of(kNVTEBFloat16, {11, 4, 2, 8}), f.v = tensor_of(kNVTEBFloat16, {11, 4, 2, 16});
  const Tensor table = tensor_of(kNVTEInt32, {2, 3});
  f.call.table_k = f.call.table_v = &table;
  f.call.options.layout = NVTE_Paged_KV_BSHD_BSHD_BSHD;
  Sizes s = work_of(f.call).sizes;
  EXPECT_EQ(s.k.count, 11);
  EXPECT_EQ(s.k.size, 4);
  EXPECT_EQ(s.v.columns, 3);
  f.call.options.layout = NVTE_Paged_KV_BSHD_SBHD_SBHD;
  s = work_of(f.call).sizes;
  EXPECT_EQ(s.k.count, 4);
  EXPECT_EQ(s.k.size, 11);
}

TEST(NvteWork, APageTableHasARowForEverySequence) {
  Fixture f;
  f.call.options.mask = NVTE_PADDING_MASK;
  f.k = tensor_of(kNVTEBFloat16, {11, 4, 2, 8}), f.v = tensor_of(kNVTEBFloat16, {11, 4, 2, 16});
  const Tensor two = tensor_of(kNVTEInt32, {2, 3}), one = tensor_of(kNVTEInt32, {1, 3});
  f.call.options.layout = NVTE_Paged_KV_BSHD_BSHD_BSHD;
  f.call.table_k = &one, f.call.table_v = &two;
  EXPECT_NE(f.error().find("page table of K is [1, 3]; needs [batch = 2"), std::string::npos);
  f.call.table_k = &two, f.call.table_v = &one;
  EXPECT_NE(f.error().find("page table of V is [1, 3]; needs [batch = 2"), std::string::npos);
}

TEST(NvteWork, WhatDoesNotFitIsRefused) {
  const struct {
    const char* why;
    void (*change)(Fixture&);
  } rows[] = {
      {"shape of Q is [4, 8]; needs at least 3",
       [](Fixture& f) {
         f.q = tensor_of(kNVTEBFloat16, {4, 8});
       }},
      {"shape of Q is [9, 4, 8]; needs 10 rows",
       [](Fixture& f) {
         f.q = tensor_of(kNVTEBFloat16, {9, 4, 8});
       }},
      {"shape of V is [13, 2, 16]; needs 14 rows",
       [](Fixture& f) {
         f.v = tensor_of(kNVTEBFloat16, {13, 2, 16});
       }},
      {"head dim of K is 16; needs that of Q", [](Fixture& f) { f.k = f.v; }},
      {"heads of V is 4; needs those of K",
       [](Fixture& f) {
         f.v = tensor_of(kNVTEBFloat16, {14, 4, 16});
       }},
      {"shape of cu_seqlens_q is [0]; needs [batch + 1]", [](Fixture& f) { f.cu = f.none; }},
      {"Q and KV must have the same data type.", [](Fixture& f) { f.k.data.dtype = kNVTEFloat16; }},
      {"dtype of V is 5; needs that of K", [](Fixture& f) { f.v.data.dtype = kNVTEFloat16; }},
      {"dtype of O is 4; needs that of Q", [](Fixture& f) { f.o.data.dtype = kNVTEFloat32; }},
      {"shape of Bias is [1, 4, 5, 6]; needs [1 or 2, 1 or 4, 1 or 5, 7]", [](Fixture& f) {
         f.call.options.bias = NVTE_POST_SCALE_BIAS;
         f.bias = tensor_of(kNVTEBFloat16, {1, 4, 5, 6});
       }}};
  EXPECT_EQ(Fixture().error(), "");
  for (const auto& row : rows) {
    Fixture f;
    row.change(f);
    EXPECT_NE(f.error().find(row.why), std::string::npos) << f.error() << "\nneeds: " << row.why;
  }
}

TEST(NvteWork, BackwardReadsTheShapeOfTheBiasFromItsGradient) {
  Fixture f;
  BackwardCall call{};
  static_cast<Call&>(call) = f.call;
  call.options.bias = NVTE_POST_SCALE_BIAS;
  const Tensor dbias = tensor_of(kNVTEFloat32, {2, 1, 5, 7});
  const Tensor dout = tensor_of(kNVTEBFloat16, {10, 4, 16});
  call.o = &f.o, call.dout = &dout, call.dp = &f.none, call.dbias = &dbias;
  call.dq = &f.q, call.dk = &f.k, call.dv = &f.v, call.dsoftmax_offset = &f.none;
  EXPECT_EQ(work_of(call).bias_broadcast, TEA_BROADCAST_HEAD);
}

TEST(NvteWork, BiasesLackDimensionsOfSizeOne) {
  const Sizes s{.batch = 2, .heads_q = 4, .max_q = 5, .max_kv = 7};
  const auto bits = [&](std::initializer_list<size_t> sizes) {
    return bias_broadcast("Bias", make_shape(sizes.begin(), sizes.size()), s);
  };
  EXPECT_EQ(bits({2, 4, 5, 7}), 0);
  EXPECT_EQ(bits({1, 4, 5, 7}), TEA_BROADCAST_BATCH);
  EXPECT_EQ(bits({2, 1, 5, 7}), TEA_BROADCAST_HEAD);
  EXPECT_EQ(bits({1, 1, 5, 7}), TEA_BROADCAST_BATCH | TEA_BROADCAST_HEAD);
  EXPECT_EQ(bits({1, 1, 1, 7}), TEA_BROADCAST_BATCH | TEA_BROADCAST_HEAD | TEA_BROADCAST_ROW);
  EXPECT_THROW(bits({3, 4, 5, 7}), Error);
  EXPECT_THROW(bits({2, 4, 5, 1}), Error);
  EXPECT_THROW(bits({4, 5, 7}), Error);
}

}  // namespace
}  // namespace tea::nvte
