// Which problems are valid, and their canonical form. (Error texts: test_refusals.cpp.)
#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "core/error.h"
#include "core/problem.h"

namespace tea {
namespace {

constexpr const char* kBase =
    "dtype=bf16 batch=2 seqlen_q=8 seqlen_kv=8 heads_q=4 heads_kv=2 dim_qk=64 ";

Problem valid(const std::string& more) {
  const Problem p = Problem::parse(kBase + more);
  p.check();
  return p;
}
std::string canonical(const std::string& more) { return valid(more).normalised().text(); }

TEST(Validity, EmptyTensorsAreValid) {
  for (const char* line : {"dtype=fp32 heads_q=1 heads_kv=1 dim_qk=8",
                           "dtype=fp32 heads_q=1 heads_kv=1 dim_qk=8 batch=3 seqlen_q=5 training=1",
                           "dtype=fp32 heads_q=1 heads_kv=1 dim_qk=8 batch=3 seqlen_kv=5"})
    EXPECT_NO_THROW(Problem::parse(line).check()) << line;
}

// Dropout is one of training, which pages exclude: without it, both may be given.
TEST(Validity, PagesAndDropoutExcludeEachOtherOnlyInTraining) {
  const std::string pages =
      "dtype=fp32 kv_form=paged page_size=4 heads_q=1 heads_kv=1 dim_qk=8 seqlen_q=1 dropout=0.5";
  EXPECT_NO_THROW(Problem::parse(pages).check());
  EXPECT_THROW(Problem::parse(pages + " training=1").check(), Error);
}

TEST(Validity, PackedOutputsMayInterleaveButNotOverlap) {
  // dq, dk, dv side by side in one [b, s, 4 + 2 + 2, d] buffer.
  EXPECT_NO_THROW(valid("training=1 dq=4096,512,64 dk=4096,512,64 dv=4096,512,64"));
  EXPECT_THROW(valid("o=0,256,64"), Error);
  EXPECT_THROW(valid("training=1 dk=1024,64,64"), Error);
  EXPECT_NO_THROW(valid("k=0,128,64 v=0,0,64"));  // inputs may repeat
}

TEST(Normalised, SynonymsBecomeOneForm) {
  const struct {
    const char *a, *b;
  } pairs[] = {
      {"causal=1", "window_right=1"},
      {"causal=1", "causal=1 window_right=5"},
      {"causal=1", "causal=1 bottom_right=1"},  // equal lengths
      {"", "bottom_right=1"},                   // no diagonal
      {"", "o_dtype=bf16 dim_v=64 alignment=16"},
      {"training=1", "training=1 outputs=lse dout_dtype=bf16 dqkv_dtype=bf16"},
      {"", "dropout=0.5"},  // drops only when training
      {"", "q=2048,256,64 k=1024,128,64 v=1024,128,64 o=2048,256,64"},
      {"outputs=lse", "outputs=lse lse=32,1,8"},
      {"bias=post_scale", "bias=post_scale bias_dtype=bf16 bias_stride=256,64,8,1"},
      {"bias=post_scale bias_broadcast=batch",
       "bias=post_scale bias_broadcast=batch bias_stride=0,64,8,1"},
      {"", "softcap=-0 has_scale=0 scale=-0"},
  };
  for (const auto& pair : pairs) EXPECT_EQ(canonical(pair.a), canonical(pair.b)) << pair.b;
}

TEST(Normalised, WhatDiffersStaysDifferent) {
  std::vector<std::string> seen;
  for (const char* more : {"",
                           "causal=1",
                           "window_left=1",
                           "window_right=2",
                           "alibi=standard",
                           "softcap=1",
                           "causal=1 window_left=3",
                           "has_scale=1",
                           "softmax=off_by_one",
                           "q=4096,256,64",
                           "training=1",
                           "training=1 dropout=0.5",
                           "deterministic=1",
                           "outputs=lse",
                           "outputs=max",
                           "q_form=padded",
                           "q_form=padded causal=1 bottom_right=1",
                           "bias=pre_scale",
                           "bias=post_scale",
                           "bias=post_scale bias_dtype=fp32",
                           "alignment=2"}) {
    seen.push_back(canonical(more));
    for (size_t i = 0; i + 1 < seen.size(); ++i) EXPECT_NE(seen[i], seen.back()) << more;
  }
}

TEST(Normalised, IsItsOwnCanonicalForm) {
  for (const char* more : {"causal=1 window_right=4 bottom_right=1", "training=1 dropout=0.25",
                           "q_form=padded alibi=standard bottom_right=1"}) {
    const Problem p = valid(more).normalised();
    EXPECT_NO_THROW(p.check());
    EXPECT_EQ(p.normalised(), p);
  }
}

TEST(Import, AShorterStructIsExtendedWithZeros) {
  Problem p = Problem::parse(kBase);
  p.struct_size = offsetof(tea_problem, q);
  p.q.batch = 77;  // beyond what this caller knows: not read
  const Problem imported = Problem::import(&p);
  EXPECT_EQ(imported.q.batch, 0);
  EXPECT_EQ(imported.struct_size, sizeof(tea_problem));
  EXPECT_EQ(imported.dim_qk, 64);
}

TEST(Import, ALongerStructNeedsAZeroTail) {
  std::vector<char> bytes(sizeof(tea_problem) + 8);
  Problem p = Problem::parse(kBase);
  p.struct_size = static_cast<uint32_t>(bytes.size());
  std::memcpy(bytes.data(), &p, sizeof(tea_problem));
  const auto* caller = reinterpret_cast<const tea_problem*>(bytes.data());
  EXPECT_NO_THROW(Problem::import(caller));
  bytes.back() = 1;
  EXPECT_THROW(Problem::import(caller), Error);
}

}  // namespace
}  // namespace tea
