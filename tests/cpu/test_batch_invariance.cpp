// Batch-invariant problems on the engines of the host: kit/invariance.h.
#include <gtest/gtest.h>

#include "kit/check.h"
#include "kit/invariance.h"

namespace tea::kit {
namespace {

const std::string kInvariant = " batch_invariant=1";
const std::string kLong = "dtype=bf16 q_form=ragged kv_form=ragged heads_q=2 heads_kv=1 dim_qk=8";

// Several parts of 1024 keys, of which windows begin anywhere.
const std::vector<std::vector<Chunk>> kManyKeys = {{{1, 0, 3000}},
                                                   {{1, 2990, 1}},
                                                   {{2, 0, 5}, {1, 1020, 9}, {3, 100, 900}},
                                                   {{1, 2047, 130}, {4, 6000, 1}},
                                                   {{1, 2047, 1}},
                                                   {{1, 2048, 1}},
                                                   {{1, 2300, 700}}};

class EveryEngine : public testing::TestWithParam<std::string> {};

TEST_P(EveryEngine, BitsDependOnTheSequenceAlone) {
  for (const std::string& engine : host_engines())
    for (const std::string& line :
         invariance_violations(GetParam() + kInvariant, engine, kHost, 150))
      ADD_FAILURE() << engine << ": " << line;
}

TEST(BatchInvariance, OfManyKeys) {
  for (const char* options : {"", " window_left=1500"})
    for (const std::string& line :
         invariance_violations(kLong + kInvariant + options, "cpu", kHost, kManyKeys))
      ADD_FAILURE() << line;
}

// Where the keys of the whole batch decide which kernels run and how keys are split, bits differ,
// and the comparison says so.
TEST(BatchInvariance, IsMissingWithoutTheOption) {
  EXPECT_FALSE(invariance_violations(kLong, "cpu", kHost, kManyKeys).empty());
}

INSTANTIATE_TEST_SUITE_P(
    BatchInvariance, EveryEngine,
    testing::Values("dtype=bf16 q_form=ragged kv_form=ragged heads_q=4 heads_kv=2 dim_qk=40",
                    "dtype=fp32 q_form=ragged kv_form=ragged heads_q=2 heads_kv=2 dim_qk=16 "
                    "window_left=40 softmax=learnable",
                    "dtype=fp16 q_form=ragged kv_form=paged page_size=16 heads_q=8 heads_kv=1 "
                    "dim_qk=64 dim_v=24 softcap=20",
                    "dtype=fp64 q_form=ragged kv_form=ragged heads_q=1 heads_kv=1 dim_qk=8",
                    "dtype=bf16 q_form=ragged kv_form=paged page_size=1 heads_q=3 heads_kv=1 "
                    "dim_qk=576 dim_v=512 alibi=standard",
                    "dtype=bf16 kv_dtype=e4m3 q_form=ragged kv_form=paged page_size=16 heads_q=2 "
                    "heads_kv=1 dim_qk=64",
                    "dtype=e4m3 o_dtype=bf16 q_form=ragged kv_form=ragged heads_q=2 heads_kv=1 "
                    "dim_qk=32"));

}  // namespace
}  // namespace tea::kit
