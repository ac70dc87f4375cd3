// Batch-invariant problems on the GPU: kit/invariance.h, with enough heads and rows that some of
// the batches split their keys among CTAs and others compute the splits one after the other.
#include "kit/invariance.h"

#include <gtest/gtest.h>

#include <span>

#include "gpu/parallel.h"
#include "kit/check.h"

namespace tea::kit {
namespace {

constexpr int kGpu = 0;
constexpr int64_t kLength = 4500;  // three splits of 2048 keys

std::vector<std::vector<Chunk>> batches() {
  return {{{1, 0, kLength}},
          {{2, 5, 3}, {1, 0, kLength}, {3, 0, 700}},
          {{1, 0, 2048}},
          {{1, 2048, 1}, {4, 6000, 40}},
          {{5, 0, 40}, {1, 2048, kLength - 2048}},
          {{1, 2000, 130}},
          {{1, kLength - 1, 1}},
          {{6, 9000, 2}, {1, kLength - 1, 1}, {1, kLength - 3, 2}},
          std::vector<Chunk>(40, {1, kLength - 1, 1})};
}

void expect_invariance(std::span<const std::string> lines, const std::string& engine,
                       const std::vector<std::vector<Chunk>>& batches) {
  parallel_for(lines.size(), [&](size_t i) {
    for (const std::string& line :
         invariance_violations(lines[i] + " batch_invariant=1", engine, kGpu, batches))
      ADD_FAILURE() << line;
  });
}

TEST(Invariance, BitsDependOnTheSequenceAlone) {
  const std::string ragged = "q_form=ragged kv_form=ragged ",
                    paged = "q_form=ragged kv_form=paged ";
  const std::string lines[] = {
      "dtype=bf16 " + ragged + "heads_q=8 heads_kv=2 dim_qk=128",
      "dtype=fp16 " + paged + "page_size=16 heads_q=4 heads_kv=1 dim_qk=64 softcap=20",
      "dtype=fp32 " + ragged + "heads_q=2 heads_kv=1 dim_qk=64 softmax=learnable",
      "dtype=bf16 " + ragged + "heads_q=4 heads_kv=4 dim_qk=256 window_left=700 alibi=standard",
      "dtype=bf16 " + paged + "page_size=64 heads_q=16 heads_kv=1 dim_qk=576 dim_v=512",
      "dtype=e4m3 o_dtype=bf16 " + ragged + "heads_q=2 heads_kv=2 dim_qk=64",
  };
  expect_invariance(lines, "", batches());
}

// The decoding kernels of the engine `hopper`: few queries, keys split every 1024.
TEST(Invariance, BitsOfDecodingOnHopperDependOnTheSequenceAlone) {
  const std::string ragged = "q_form=ragged kv_form=ragged ",
                    paged = "q_form=ragged kv_form=paged ";
  const std::string lines[] = {
      "dtype=bf16 " + ragged + "heads_q=8 heads_kv=1 dim_qk=128",
      "dtype=fp16 " + paged + "page_size=16 heads_q=16 heads_kv=2 dim_qk=64 softcap=20",
      "dtype=bf16 " + paged +
          "page_size=3 heads_q=16 heads_kv=4 dim_qk=192 dim_v=128 softmax=learnable",
      "dtype=fp16 " + ragged + "heads_q=2 heads_kv=1 dim_qk=256 alibi=standard",
      "dtype=bf16 " + paged + "page_size=64 heads_q=100 heads_kv=1 dim_qk=576 dim_v=512",
  };
  // One split, the last of a group of splits and the first of the next, and several groups.
  std::vector<std::vector<Chunk>> batches;
  for (const int64_t end : {int64_t{700}, int64_t{1030}, int64_t{12 * 1024 + 3}, int64_t{26000}}) {
    batches.push_back({{1, end - 1, 1}});
    batches.push_back({{1, end - 8, 8}});
    batches.push_back({{1, end - 5, 3}, {1, end - 2, 2}});
    batches.push_back({{6, 9000, 2}, {1, end - 1, 1}, {2, 0, 5}, {1, end - 7, 6}});
    batches.push_back({{1, end - 1, 8}});  // longer than the rows of the other batches
    batches.emplace_back(9, Chunk{1, end - 1, 1});
  }
  expect_invariance(lines, "hopper", batches);
}

// No other engine has the bits of the decoding kernels, so that runs with more queries are refused,
// which the number of ragged queries decides.
TEST(Invariance, RefusesRunsOfMoreRaggedQueriesThanDecodingOnHopperServes) {
  const Case few = Case::parse(
      "dtype=bf16 q_form=ragged kv_form=ragged heads_q=8 heads_kv=1 dim_qk=64 batch_invariant=1 | "
      "lens_q=8,1 lens_kv=40,40");
  EXPECT_TRUE(check(few, "hopper", {.device = kGpu}).ok());
  Case many = few;
  many.lens_q[1] = 9;
  const Report report = check(many, "hopper", {.device = kGpu});
  EXPECT_TRUE(report.refused);
  EXPECT_NE(report.text().find("are 72; needs at most 64"), std::string::npos) << report.text();
}

}  // namespace
}  // namespace tea::kit
