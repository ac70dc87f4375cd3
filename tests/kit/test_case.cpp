// The grammar of a case: exact round trip, and mistakes refused by name.
#include <gtest/gtest.h>

#include "core/error.h"
#include "kit/case.h"

namespace tea::kit {
namespace {

constexpr const char* kRagged =
    "dtype=bf16 q_form=ragged kv_form=ragged gaps=1 heads_q=4 heads_kv=2 dim_qk=64 causal=1 "
    "training=1";

TEST(Case, PrintsWhatItParsed) {
  for (const std::string words :
       {"lens_q=5,0,37 lens_kv=5,3,37 gap=2 tail=1 seed=7 values=outliers layout=odd",
        "lens_q=1 lens_kv=2 max_q=3 max_kv=4 seed=18446744073709551615 scales=own "
        "sink_mean=-50 bias_mean=100 omit_optional=1 origin=1,2,3,4 origin_in_memory=1"}) {
    const Case c = Case::parse(std::string(kRagged) + " | " + words);
    EXPECT_EQ(Case::parse(c.text()).text(), c.text());
    EXPECT_TRUE(Case::parse(c.text()).problem == c.problem);
    for (size_t begin = 0; begin < words.size();) {
      const size_t end = std::min(words.find(' ', begin), words.size());
      EXPECT_NE(c.text().find(words.substr(begin, end - begin)), std::string::npos) << c.text();
      begin = end + 1;
    }
  }
  const Case plain = Case::parse("dtype=fp16 heads_q=1 heads_kv=1 dim_qk=8");
  EXPECT_EQ(plain.text().find('|'), std::string::npos);
}

struct Mistake {
  const char* words;
  const char* fragment;  // of the message
};
class CaseMistake : public testing::TestWithParam<Mistake> {};

TEST_P(CaseMistake, IsRefusedByName) {
  try {
    Case::parse(std::string(kRagged) + " | " + GetParam().words);
    FAIL() << "accepted";
  } catch (const Error& e) {
    EXPECT_EQ(e.status, TEA_INVALID);
    EXPECT_NE(std::string(e.what()).find(GetParam().fragment), std::string::npos) << e.what();
  }
}

INSTANTIATE_TEST_SUITE_P(
    Words, CaseMistake,
    testing::Values(Mistake{"lens_q=1 lens_kv=1 colour=red", "colour=red"},
                    Mistake{"lens_q=1 lens_kv=1 seed", "seed"},
                    Mistake{"lens_q=1 lens_kv=1 seed=1 seed=2", "each word once"},
                    Mistake{"lens_q=1 lens_kv=1 seed=-1", "an integer"},
                    Mistake{"lens_q=1,x lens_kv=1,1", "an integer"},
                    Mistake{"lens_q=1,-2 lens_kv=1,1", "from 0"},
                    Mistake{"lens_q=1,2 lens_kv=1", "as many lengths"},
                    Mistake{"lens_q=1", "lengths of both sides"},
                    Mistake{"lens_q=4 lens_kv=1 max_q=3", "from 0 to 3"},
                    Mistake{"lens_q=1 lens_kv=1 values=nice", "one of randn"},
                    Mistake{"lens_q=1 lens_kv=1 layout=round", "one of default"},
                    Mistake{"lens_q=1 lens_kv=1 origin=1,2", "batch,head,row,column"}));

TEST(Case, RefusesLengthsOfADenseSideAndGapsThatTheProblemLacks) {
  const std::string dense = "dtype=fp16 heads_q=1 heads_kv=1 dim_qk=8 batch=1 seqlen_q=4";
  EXPECT_THROW(Case::parse(dense + " seqlen_kv=4 | lens_q=3"), Error);
  EXPECT_THROW(Case::parse(dense + " kv_form=padded seqlen_kv=4 | lens_kv=5"), Error);
  EXPECT_THROW(Case::parse(dense + " seqlen_kv=4 | gap=1"), Error);
  EXPECT_THROW(read_lines(TE_ATTENTION_SOURCE_DIR "/tests/problems/missing.txt"), Error);
}

}  // namespace
}  // namespace tea::kit
