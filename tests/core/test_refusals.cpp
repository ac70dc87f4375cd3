// The refusals of problems, as one table: the field, the value seen, the value needed; and
// that a refusal leaves no plan and writes nothing.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <sstream>

#include "core/problem.h"

namespace tea {
namespace {

// A valid problem; rows of the tables change words of it.
constexpr const char* kDense =
    "dtype=bf16 training=1 heads_q=4 heads_kv=2 dim_qk=16 batch=2 seqlen_q=5 seqlen_kv=7";
constexpr const char* kRagged =
    "dtype=bf16 training=1 q_form=ragged kv_form=ragged heads_q=4 heads_kv=2 dim_qk=16";
constexpr const char* kPaged =
    "dtype=bf16 kv_form=paged page_size=4 heads_q=4 heads_kv=2 dim_qk=16 seqlen_q=1";
constexpr const char* kFp8 =
    "dtype=e4m3 training=1 heads_q=4 heads_kv=2 dim_qk=16 batch=2 seqlen_q=5 seqlen_kv=7";
constexpr const char* kInference =
    "dtype=fp16 heads_q=4 heads_kv=2 dim_qk=16 batch=2 seqlen_q=5 seqlen_kv=7";

// `base` with the words of `changes` in place of its own.
Problem changed(const char* base, const char* changes) {
  std::map<std::string, std::string> words;
  for (const char* text : {base, changes}) {
    std::istringstream in(text);
    for (std::string word; in >> word;) words[word.substr(0, word.find('='))] = word;
  }
  std::string line;
  for (const auto& [name, word] : words) line += word + " ";
  return Problem::parse(line);
}

struct Row {
  const char* base;
  const char* changes;
  const char* seen;    // "name is value"
  const char* needed;  // a part of what is needed
};

// Every function that takes a problem refuses it with the same sentence and gives nothing back.
void expect_refused(const Problem& p, const Row& row) {
  const auto message_fits = [&] {
    const std::string message = tea_error();
    EXPECT_NE(message.find(row.seen), std::string::npos) << message << "\n  wanted: " << row.seen;
    EXPECT_NE(message.find(std::string("needs ") + row.needed), std::string::npos)
        << message << "\n  wanted: needs " << row.needed;
  };
  EXPECT_EQ(tea_problem_check(&p, nullptr), TEA_INVALID) << row.seen;
  message_fits();
  auto* const untouched = reinterpret_cast<tea_plan*>(1);
  tea_plan* plan = untouched;
  EXPECT_EQ(tea_plan_create(&p, -1, nullptr, &plan), TEA_INVALID) << row.seen;
  EXPECT_EQ(plan, nullptr) << "a refused plan must not be released";
  message_fits();
  tea_problem normalised, before;
  std::memset(&normalised, 0x5A, sizeof normalised);
  std::memcpy(&before, &normalised, sizeof before);
  EXPECT_EQ(tea_problem_check(&p, &normalised), TEA_INVALID);
  EXPECT_EQ(std::memcmp(&normalised, &before, sizeof before), 0) << "written although refused";
}

class Refusal : public testing::TestWithParam<Row> {};
TEST_P(Refusal, NamesFieldSeenAndNeeded) {
  expect_refused(changed(GetParam().base, GetParam().changes), GetParam());
}

TEST(Refusal, BasesAreValid) {
  for (const char* base : {kDense, kRagged, kPaged, kFp8, kInference}) {
    const Problem p = changed(base, "");
    EXPECT_EQ(tea_problem_check(&p, nullptr), TEA_OK) << base << ": " << tea_error();
  }
}

INSTANTIATE_TEST_SUITE_P(
    Enums, Refusal,
    testing::Values(
        Row{kDense, "dtype=7", "dtype is 7", "one of default, fp16, bf16, fp32, fp64, e4m3, e5m2"},
        Row{kDense, "dtype=-1", "dtype is -1", "one of"},
        Row{kDense, "o_dtype=7", "o_dtype is 7", "one of"},
        Row{kDense, "o_dtype=-2", "o_dtype is -2", "one of"},
        Row{kDense, "dout_dtype=9", "dout_dtype is 9", "one of"},
        Row{kDense, "dqkv_dtype=1000", "dqkv_dtype is 1000", "one of"},
        Row{kDense, "bias=pre_scale bias_dtype=8", "bias_dtype is 8", "one of"},
        Row{kDense, "training=2", "training is 2", "one of 0, 1"},
        Row{kDense, "training=-1", "training is -1", "one of 0, 1"},
        Row{kDense, "deterministic=2", "deterministic is 2", "one of 0, 1"},
        Row{kDense, "outputs=8", "outputs is 8", "a sum of lse, max, sum_exp"},
        Row{kDense, "outputs=9", "outputs is lse+8", "a sum of lse, max, sum_exp"},
        Row{kDense, "outputs=4294967295", "outputs is lse+max+sum_exp+", "a sum of"},
        Row{kDense, "lse_gradient=2", "lse_gradient is 2", "one of 0, 1"},
        Row{kDense, "q_form=4", "q_form is 4", "one of dense, padded, ragged, paged"},
        Row{kDense, "q_form=-1", "q_form is -1", "one of dense, padded"},
        Row{kDense, "q_form=paged", "q_form is paged", "dense, padded or ragged"},
        Row{kDense, "kv_form=4", "kv_form is 4", "one of dense, padded, ragged, paged"},
        Row{kRagged, "gaps=2", "gaps is 2", "one of 0, 1"},
        Row{kDense, "causal=2", "causal is 2", "one of 0, 1"},
        Row{kDense, "causal=-1", "causal is -1", "one of 0, 1"},
        Row{kDense, "bottom_right=3", "bottom_right is 3", "one of 0, 1"},
        Row{kDense, "bias=3", "bias is 3", "one of none, pre_scale, post_scale"},
        Row{kDense, "bias=-1", "bias is -1", "one of none"},
        Row{kDense, "bias=pre_scale bias_broadcast=16", "bias_broadcast is 16", "a sum of batch"},
        Row{kDense, "bias=pre_scale bias_broadcast=17", "bias_broadcast is batch+16", "a sum of"},
        Row{kDense, "alibi=3", "alibi is 3", "one of none, standard, slopes"},
        Row{kDense, "alibi=-1", "alibi is -1", "one of none"},
        Row{kDense, "softmax=3", "softmax is 3", "one of vanilla, off_by_one, learnable"},
        Row{kDense, "softmax=-7", "softmax is -7", "one of vanilla"},
        Row{kDense, "has_scale=2", "has_scale is 2", "one of 0, 1"}));

INSTANTIATE_TEST_SUITE_P(
    Types, Refusal,
    testing::Values(Row{kDense, "dtype=default", "dtype is default", "an explicit type"},
                    Row{kDense, "o_dtype=fp16", "o_dtype is fp16", "bf16"},
                    Row{kDense, "o_dtype=e4m3", "o_dtype is e4m3", "bf16"},
                    Row{kDense, "o_dtype=fp64", "o_dtype is fp64", "bf16, fp32"},
                    Row{kDense, "dout_dtype=fp16", "dout_dtype is fp16", "bf16"},
                    Row{kDense, "dqkv_dtype=fp64", "dqkv_dtype is fp64", "bf16, fp32"},
                    Row{kFp8, "o_dtype=fp64", "o_dtype is fp64", "fp16, bf16, fp32, e4m3, e5m2"},
                    Row{kFp8, "dout_dtype=fp64", "dout_dtype is fp64", "fp16, bf16, fp32, e4m3"},
                    Row{kFp8, "dqkv_dtype=fp64", "dqkv_dtype is fp64", "fp16, bf16, fp32, e4m3"},
                    Row{kDense, "bias=post_scale bias_dtype=fp16", "bias_dtype is fp16", "bf16, "},
                    Row{kDense, "bias=post_scale bias_dtype=fp64", "bias_dtype is fp64", "bf16, "},
                    Row{kFp8, "bias=post_scale bias_dtype=e4m3", "bias_dtype is e4m3", "fp16, "},
                    Row{kFp8, "bias=post_scale bias_dtype=fp64", "bias_dtype is fp64", "fp16, "}));

INSTANTIATE_TEST_SUITE_P(
    Sizes, Refusal,
    testing::Values(
        Row{kDense, "heads_q=0", "heads_q is 0", "at least 1"},
        Row{kDense, "heads_q=-4", "heads_q is -4", "at least 1"},
        Row{kDense, "heads_kv=0", "heads_kv is 0", "at least 1"},
        Row{kDense, "heads_kv=-1", "heads_kv is -1", "at least 1"},
        Row{kDense, "heads_q=5", "heads_q is 5", "a multiple of heads_kv, which is 2"},
        Row{kDense, "heads_kv=8", "heads_q is 4", "a multiple of heads_kv, which is 8"},
        Row{kDense, "dim_qk=0", "dim_qk is 0", "a multiple of 8"},
        Row{kDense, "dim_qk=-8", "dim_qk is -8", "a multiple of 8"},
        Row{kDense, "dim_qk=7", "dim_qk is 7",
            "a multiple of 8, at most 512 with training = 1 (pad to 8 with"},
        Row{kDense, "dim_qk=100", "dim_qk is 100",
            "a multiple of 8, at most 512 with training = 1 (pad to 104"},
        Row{kDense, "dim_qk=520", "dim_qk is 520",
            "a multiple of 8 from 8 to 512 with training = 1"},
        Row{kInference, "dim_qk=1032", "dim_qk is 1032", "a multiple of 8 from 8 to 1024"},
        Row{kInference, "dim_v=1025", "dim_v is 1025", "a multiple of 8 from 8 to 1024"},
        Row{kInference, "dim_v=1020", "dim_v is 1020",
            "a multiple of 8, at most 1024 (pad to 1024 with zeros)"},
        Row{kDense, "dim_qk=513", "dim_qk is 513", "a multiple of 8 from 8 to 512"},
        Row{kDense, "dim_v=4", "dim_v is 4",
            "a multiple of 8, at most 512 with training = 1 (pad to 8 with"},
        Row{kDense, "dim_v=-16", "dim_v is -16", "a multiple of 8"},
        Row{kDense, "dim_v=1024", "dim_v is 1024", "a multiple of 8"},
        Row{kDense, "batch=-1", "batch is -1", "0 or more"},
        Row{kDense, "seqlen_q=-5", "seqlen_q is -5", "0 or more"},
        Row{kDense, "seqlen_kv=-9223372036854775808", "seqlen_kv is -9223372036854775808", "0 or"},
        Row{kRagged, "batch=2", "batch is 2", "0: with a ragged or paged side this size is given"},
        Row{kRagged, "seqlen_q=2", "seqlen_q is 2", "0: with a ragged or paged side"},
        Row{kRagged, "seqlen_kv=2", "seqlen_kv is 2", "0: with a ragged or paged side"},
        Row{kPaged, "batch=1", "batch is 1", "0: with a ragged or paged side"},
        Row{kPaged, "seqlen_kv=64", "seqlen_kv is 64", "0: with a ragged or paged side"},
        Row{kDense, "kv_form=ragged seqlen_kv=0", "batch is 2", "0: with a ragged or paged side"},
        Row{kDense, "gaps=1", "gaps is 1", "a ragged q_form or kv_form"},
        Row{kPaged, "gaps=1", "gaps is 1", "a ragged q_form or kv_form"},
        Row{kDense, "page_size=16", "page_size is 16", "0 unless kv_form is paged"},
        Row{kRagged, "page_size=16", "page_size is 16", "0 unless kv_form is paged"},
        Row{kPaged, "page_size=0", "page_size is 0", "at least 1"},
        Row{kPaged, "page_size=-2", "page_size is -2", "at least 1"},
        Row{kPaged, "training=1", "training is 1", "0: paged keys and values have no gradient"},
        Row{kInference, "kv_dtype=e4m3 training=1", "training is 1", "0: keys and values of anoth"},
        Row{kInference, "kv_dtype=fp32", "kv_dtype is fp32", "fp16, e4m3, e5m2 for this dtype"},
        Row{kInference, "dtype=fp32 kv_dtype=e4m3", "kv_dtype is e4m3", "fp32 for this dtype"},
        Row{kInference, "dtype=e4m3 kv_dtype=e5m2", "kv_dtype is e5m2", "e4m3 for this dtype"}));

INSTANTIATE_TEST_SUITE_P(
    Numbers, Refusal,
    testing::Values(
        Row{kDense, "window_left=-1", "window_left is -1", "0 (none) or the bound + 1"},
        Row{kDense, "window_right=-2", "window_right is -2", "0 (none) or the bound + 1"},
        Row{kDense, "softcap=-1", "softcap is -1", "0 or more, finite"},
        Row{kDense, "softcap=inf", "softcap is inf", "0 or more, finite"},
        Row{kDense, "softcap=nan", "softcap is nan", "0 or more, finite"},
        Row{kDense, "dropout=-0.1", "dropout is -0.1", "at least 0 and below 1"},
        Row{kDense, "dropout=1", "dropout is 1", "at least 0 and below 1"},
        Row{kDense, "dropout=1.5", "dropout is 1.5", "at least 0 and below 1"},
        Row{kDense, "dropout=nan", "dropout is nan", "at least 0 and below 1"},
        Row{kDense, "scale=inf has_scale=1", "scale is inf", "a finite number"},
        Row{kDense, "scale=nan has_scale=1", "scale is nan", "a finite number"},
        Row{kDense, "scale=0.5", "scale is 0.5", "has_scale = 1, else 0"},
        Row{kDense, "alignment=3", "alignment is 3", "0 or a power of two"},
        Row{kDense, "alignment=-16", "alignment is -16", "0 or a power of two"},
        Row{kDense, "alignment=1", "alignment is 1", "0 or a power of two, at least the size"},
        Row{kDense, "alignment=24", "alignment is 24", "0 or a power of two"},
        Row{kDense, "dtype=fp64 alignment=4", "alignment is 4", "0 or a power of two, at least"},
        Row{kDense, "scale=1e39 has_scale=1", "scale is 1e+39", "a number in the range of fp32"},
        Row{kDense, "scale=1e-50 has_scale=1", "scale is 1e-50", "a number in the range of fp32"},
        Row{kDense, "softcap=1e-50", "softcap is 1e-50", "a number in the range of fp32"}));

// A field that would have no effect is a mistake, not something to ignore.
INSTANTIATE_TEST_SUITE_P(
    Effects, Refusal,
    testing::Values(
        Row{kDense, "bias_broadcast=batch", "bias_broadcast is batch", "a bias"},
        Row{kDense, "bias_dtype=fp32", "bias_dtype is fp32", "a bias"},
        Row{kDense, "bias_stride=140,35,7,1", "bias_stride is 140,35,7,1", "a bias"},
        Row{kDense, "dbias_stride=140,35,7,1", "dbias_stride is 140,35,7,1", "a bias and training"},
        Row{kInference, "bias=pre_scale dbias_stride=140,35,7,1", "dbias_stride is", "a bias and"},
        Row{kInference, "dout=320,64,16", "dout is 320,64,16", "training = 1"},
        Row{kInference, "dq=320,64,16", "dq is 320,64,16", "training = 1"},
        Row{kInference, "dk=224,32,16", "dk is 224,32,16", "training = 1"},
        Row{kInference, "dv=224,32,16", "dv is 224,32,16", "training = 1"},
        Row{kInference, "dout_dtype=fp16", "dout_dtype is fp16", "training = 1"},
        Row{kInference, "dqkv_dtype=fp16", "dqkv_dtype is fp16", "training = 1"},
        Row{kInference, "lse_gradient=1", "lse_gradient is 1", "training = 1"},
        Row{kInference, "lse=20,1,5", "lse is 20,1,5", "LSE, MAX or SUM_EXP among the outputs"},
        Row{kDense, "slopes_stride=4", "slopes_stride is 4", "alibi = slopes"},
        Row{kDense, "alibi=standard slopes_stride=4", "slopes_stride is 4", "alibi = slopes"},
        Row{kDense, "table_k_stride=4", "table_k_stride is 4", "kv_form = paged"},
        Row{kRagged, "table_v_stride=4", "table_v_stride is 4", "kv_form = paged"},
        Row{kInference, "kv_scale=head", "kv_scale is head", "a kv_dtype that is not dtype"},
        Row{kInference, "max_ctas=-1", "max_ctas is -1", "0 (no limit) or more"}));

INSTANTIATE_TEST_SUITE_P(
    Strides, Refusal,
    testing::Values(
        Row{kDense, "q=-320,64,16", "q is -320,64,16", "strides of 0 or more"},
        Row{kDense, "k=224,-32,16", "k is 224,-32,16", "strides of 0 or more"},
        Row{kDense, "v=224,32,-16", "v is 224,32,-16", "strides of 0 or more"},
        Row{kDense, "o=320,64,-1", "o is 320,64,-1", "strides of 0 or more"},
        Row{kDense, "dout=-1,64,16", "dout is -1,64,16", "strides of 0 or more"},
        Row{kDense, "dq=-1,64,16", "dq is -1,64,16", "strides of 0 or more"},
        Row{kDense, "dk=-1,32,16", "dk is -1,32,16", "strides of 0 or more"},
        Row{kDense, "dv=-1,32,16", "dv is -1,32,16", "strides of 0 or more"},
        Row{kDense, "lse=20,-1,5", "lse is 20,-1,5", "strides of 0 or more"},
        Row{kDense, "bias=pre_scale bias_stride=-1,35,7,1", "bias_stride is -1", "strides of 0 or"},
        Row{kDense, "bias=pre_scale dbias_stride=140,35,7,-1", "dbias_stride is 1", "strides of"},
        Row{kDense, "alibi=slopes slopes_stride=-4", "slopes_stride is -4", "strides of 0 or more"},
        Row{kPaged, "table_k_stride=-1", "table_k_stride is -1", "strides of 0 or more"},
        Row{kPaged, "table_v_stride=-1", "table_v_stride is -1", "strides of 0 or more"},
        Row{kRagged, "q=8,64,16", "q.batch is 8", "0: a ragged side has no batch stride"},
        Row{kRagged, "k=8,32,16", "k.batch is 8", "0: a ragged side has no batch stride"},
        Row{kRagged, "v=8,32,16", "v.batch is 8", "0: a ragged side has no batch stride"},
        Row{kRagged, "o=8,64,16", "o.batch is 8", "0: a ragged side has no batch stride"},
        Row{kRagged, "dout=8,64,16", "dout.batch is 8", "0: a ragged side has no batch stride"},
        Row{kRagged, "dq=8,64,16", "dq.batch is 8", "0: a ragged side has no batch stride"},
        Row{kRagged, "dk=8,32,16", "dk.batch is 8", "0: a ragged side has no batch stride"},
        Row{kRagged, "dv=8,32,16", "dv.batch is 8", "0: a ragged side has no batch stride"},
        Row{kRagged, "lse=8,4,1", "lse.batch is 8", "0: a ragged side has no batch stride"},
        Row{kDense, "o=320,64,8", "O is a tensor whose strides map two", "strides that keep"},
        Row{kDense, "o=0,64,16", "O is a tensor whose strides map two", "strides that keep"},
        Row{kDense, "dq=320,16,16", "dQ is a tensor whose strides map two", "strides that keep"},
        Row{kDense, "dk=64,32,16", "dK is a tensor whose strides map two", "strides that keep"},
        Row{kDense, "dv=224,0,16", "dV is a tensor whose strides map two", "strides that keep"},
        Row{kDense, "lse=20,1,1", "LSE is a tensor whose strides map two", "strides that keep"},
        Row{kDense, "bias=pre_scale dbias_stride=35,35,7,1", "dbias is a tensor whose strides map",
            "strides that keep"},
        Row{kDense, "q=4611686018427387904,64,16", "Q with its strides is larger than 2^60",
            "a smaller extent"},
        Row{kDense, "k=224,2305843009213693952,16", "K with its strides is larger than 2^60",
            "a smaller extent"},
        Row{kDense, "batch=4611686018427387904 dim_qk=8", "is larger than 2^60", "a smaller"}));

// The growth rules: a struct that is too short to say its size, and a tail that is not zero.
TEST(StructSize, TooSmallIsRefused) {
  for (const uint32_t size : {0u, 1u, 3u}) {
    Problem p = changed(kDense, "");
    p.struct_size = size;
    const std::string seen = "struct_size is " + std::to_string(size);
    expect_refused(p, {kDense, "", seen.c_str(), "sizeof(tea_problem)"});
  }
}

TEST(StructSize, ATailOfZerosIsAcceptedAndAnyOtherRefused) {
  struct Longer : tea_problem {
    char tail[64];
  } longer{};
  static_cast<tea_problem&>(longer) = changed(kDense, "");
  longer.struct_size = sizeof longer;
  EXPECT_EQ(tea_problem_check(&longer, nullptr), TEA_OK) << tea_error();
  for (const int at : {0, 1, 63}) {
    std::memset(longer.tail, 0, sizeof longer.tail);
    longer.tail[at] = 1;
    EXPECT_EQ(tea_problem_check(&longer, nullptr), TEA_INVALID) << at;
    EXPECT_NE(std::string(tea_error()).find("struct_size is"), std::string::npos) << tea_error();
    EXPECT_NE(std::string(tea_error()).find("zeros beyond"), std::string::npos) << tea_error();
  }
}

}  // namespace
}  // namespace tea
