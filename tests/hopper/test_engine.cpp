// The engine of sm_90: what it takes and what it refuses, which needs no GPU. What it computes is
// tested by tests/gpu.
#include <gtest/gtest.h>

#include "hopper/engine.h"
#include "kit/answer.h"
#include "kit/draw.h"
#include "kit/layout.h"

namespace tea::hopper {
namespace {

constexpr Engine kEngine{"hopper", known_fields, plan};
using kit::kH200;
constexpr const char* kSizes = " batch=2 heads_q=4 heads_kv=2 seqlen_q=64 seqlen_kv=64 ";

std::string answer(const std::string& more, const Device& device = kH200,
                   const std::string& what = "dtype=bf16 dim_qk=128") {
  return kit::answer(kEngine, what + kSizes + more, device);
}

uint64_t bytes(const std::string& text) {
  const Problem p = Problem::parse(text);
  return workspace(p, default_geometry(p), Direction::kForward);
}

TEST(HopperEngine, TakesEveryOptionOfForward) {
  EXPECT_EQ(answer(""), "accepts");
  EXPECT_EQ(answer("causal=1 bottom_right=1 window_left=9"), "accepts");
  EXPECT_EQ(answer("q_form=padded kv_form=padded softmax=learnable outputs=lse+max+sum_exp"),
            "accepts");
  EXPECT_EQ(answer("bias=post_scale bias_dtype=fp32 alibi=standard softcap=20"), "accepts");
  EXPECT_EQ(answer("q=65536,16,1024"), "accepts");  // any order of the dimensions
  EXPECT_EQ(answer("training=1 dropout=0.1 lse_gradient=1"), "accepts");
  EXPECT_EQ(answer("o_dtype=fp32"), "accepts");
  EXPECT_EQ(answer("training=1 o_dtype=fp32 dout_dtype=bf16 dqkv_dtype=fp32"), "accepts");
}

bool accumulates(const std::string& more, Direction direction) {
  const Problem p = Problem::parse("dtype=fp16 dim_qk=64" + std::string(kSizes) + more);
  const Attempt attempt = kEngine.attempt(p.normalised(), kH200);
  return std::get<std::unique_ptr<Executable>>(attempt)->accumulates(direction);
}

TEST(HopperEngine, MergesOfDenseTensorsInFp32) {
  const auto can = [](const std::string& more) { return accumulates(more, Direction::kForward); };
  EXPECT_TRUE(can("o_dtype=fp32 outputs=lse causal=1 dropout=0"));
  EXPECT_TRUE(can("o_dtype=fp32 training=1 dout_dtype=fp16 dropout=0.1 bias=post_scale"));
  EXPECT_FALSE(can("outputs=lse"));                   // O in 16 bits
  EXPECT_FALSE(can("o_dtype=fp32"));                  // no LSE
  EXPECT_FALSE(can("o_dtype=fp32 outputs=lse+max"));  // largest scores are not merged
  EXPECT_FALSE(can("o_dtype=fp32 outputs=lse softmax=learnable"));
  EXPECT_FALSE(can("o_dtype=fp32 outputs=lse q_form=padded"));  // padding is overwritten by zeros
  EXPECT_FALSE(can("o_dtype=fp32 outputs=lse kv_form=padded"));
}

TEST(HopperEngine, AddsToGradientsInFp32) {
  const auto can = [](const std::string& more) {
    return accumulates("training=1 " + more, Direction::kBackward);
  };
  EXPECT_TRUE(can("dqkv_dtype=fp32"));
  EXPECT_TRUE(can("dqkv_dtype=fp32 q_form=padded kv_form=padded causal=1"));
  EXPECT_FALSE(can(""));
  EXPECT_FALSE(can("dqkv_dtype=fp32 softmax=off_by_one"));
  EXPECT_FALSE(can("dqkv_dtype=fp32 softcap=3"));  // another engine's backward
}

bool yields(const std::string& more) {
  const Problem p = Problem::parse("dtype=fp16 heads_q=4 heads_kv=2 dim_qk=64 " + more);
  const Attempt attempt = kEngine.attempt(p.normalised(), kH200);
  return std::get<std::unique_ptr<Executable>>(attempt)->yields != nullptr;
}

TEST(HopperEngine, YieldsWhereFewQueriesLeaveItsTilesEmpty) {
  EXPECT_TRUE(yields("batch=2 seqlen_q=63 seqlen_kv=4096 q_form=padded"));  // 126 rows of two heads
  EXPECT_TRUE(yields("batch=2 seqlen_q=1 seqlen_kv=4096 training=1"));
  EXPECT_FALSE(yields("batch=2 seqlen_q=64 seqlen_kv=4096"));
  EXPECT_FALSE(yields("q_form=ragged seqlen_kv=4096"));  // only a run has the number of queries
}

TEST(HopperEngine, DecodesFewQueriesOverManyKeys) {
  EXPECT_FALSE(yields("batch=2 seqlen_q=1 seqlen_kv=4096"));
  EXPECT_FALSE(yields("batch=2 seqlen_q=32 seqlen_kv=256 kv_form=padded"));
  EXPECT_TRUE(yields("batch=2 seqlen_q=1 seqlen_kv=255"));
  EXPECT_FALSE(yields("seqlen_q=1 kv_form=paged page_size=1"));
}

TEST(HopperEngine, TakesFp8KeysAndValuesWhereQueriesAreFew) {
  const auto cache = [](const std::string& more) {
    return kit::answer(
        kEngine, "dtype=bf16 kv_dtype=e4m3 heads_q=8 heads_kv=2 batch=2 seqlen_kv=512 " + more,
        kH200);
  };
  EXPECT_EQ(cache("dim_qk=128 seqlen_q=4"), "accepts");
  EXPECT_EQ(cache("dim_qk=192 dim_v=128 seqlen_q=1 kv_scale=head"), "accepts");
  EXPECT_EQ(cache("dim_qk=128 seqlen_q=5"),
            "kv_dtype is e4m3, where the queries of a sequence and a head of k and v are 20; needs "
            "at most 16");
  EXPECT_EQ(cache("dim_qk=72 seqlen_q=1"),
            "a stride of k is 72; needs a multiple of 16, less than 2^39");
  EXPECT_EQ(cache("dim_qk=72 seqlen_q=1 k=81920,160,80 v=81920,160,80"),
            "kv_dtype is e4m3, where dim_qk is 72 and dim_v 72; FP8 keys and values need "
            "multiples of 16");
}

TEST(HopperEngine, TakesLatentAttentionWhereQueriesAreFew) {
  const auto mla = [](const std::string& more) {
    return kit::answer(kEngine, "dtype=bf16 heads_q=128 heads_kv=1 dim_qk=576 dim_v=512 " + more,
                       kH200);
  };
  EXPECT_EQ(mla("batch=2 seqlen_kv=512 seqlen_q=1"), "accepts");
  EXPECT_EQ(mla("batch=2 seqlen_kv=512 seqlen_q=8 causal=1 bottom_right=1 softmax=learnable"),
            "accepts");
  EXPECT_EQ(mla("seqlen_q=1 kv_form=paged page_size=1"), "accepts");
  EXPECT_EQ(
      mla("batch=2 seqlen_kv=512 seqlen_q=9"),
      "dim_qk is 576 and dim_v 512, where the queries of a sequence and a head of k and v are "
      "1152; needs at most 1024");
  EXPECT_EQ(mla("batch=2 seqlen_kv=512 seqlen_q=1 kv_dtype=e4m3"),
            "kv_dtype is e4m3, where k and v are FP8; needs the type of q where dim_qk is beyond "
            "256");
  EXPECT_EQ(mla("batch=2 seqlen_kv=512 seqlen_q=1 softcap=5"),
            "dim_qk is 576 and dim_v 512, where the problem modifies scores (bias, ALiBi, soft cap "
            "or a scale that is not positive); needs none where dim_qk is beyond 256");
}

TEST(HopperEngine, TakesBatchInvariantProblemsOfDecoding) {
  const auto invariant = [](const std::string& more) {
    return kit::answer(kEngine,
                       "dtype=bf16 batch_invariant=1 heads_q=8 heads_kv=1 seqlen_kv=512 "
                       "dim_qk=128 " +
                           more,
                       kH200);
  };
  EXPECT_EQ(invariant("batch=2 seqlen_q=8 causal=1 bottom_right=1"), "accepts");
  EXPECT_EQ(invariant("batch=2 seqlen_q=9"),
            "batch_invariant is 1, where the queries of a sequence and a head of k and v are 72; "
            "needs at most 64");
  EXPECT_EQ(invariant("batch=2 seqlen_q=2 window_left=9"),
            "batch_invariant is 1, where window_left is 9; needs 0");
  EXPECT_EQ(
      invariant("batch=2 seqlen_q=2 max_ctas=8"),
      "batch_invariant is 1, where max_ctas is 8; needs 0, because each part of the keys has a "
      "CTA");
  EXPECT_TRUE(yields("batch=2 seqlen_q=1 seqlen_kv=4096 batch_invariant=1"));
  EXPECT_TRUE(yields("q_form=ragged kv_form=paged page_size=16 batch_invariant=1"));
}

TEST(HopperEngine, TakesAnyPagesWhereQueriesAreFew) {
  const auto paged = [](const std::string& more) {
    return kit::answer(kEngine, "dtype=bf16 kv_form=paged page_size=12 " + more, kH200);
  };
  EXPECT_EQ(paged("heads_q=64 heads_kv=8 dim_qk=128 seqlen_q=8"), "accepts");
  EXPECT_EQ(
      paged("heads_q=64 heads_kv=8 dim_qk=128 seqlen_q=9"),
      "page_size is 12, no multiple of 8, where the queries of a sequence and a head of k and v "
      "are 72; needs at most 64");
  EXPECT_EQ(paged("heads_q=64 heads_kv=1 dim_qk=128 q_form=ragged"), "accepts");
  EXPECT_EQ(
      paged("heads_q=65 heads_kv=1 dim_qk=128 q_form=ragged"),
      "page_size is 12, no multiple of 8, where the queries of a sequence and a head of k and v "
      "are 65; needs at most 64");
}

TEST(HopperEngine, TakesPrefillOverPages) {
  const auto prefill = [](const std::string& more) {
    return kit::answer(kEngine,
                       "dtype=bf16 kv_form=paged heads_q=8 heads_kv=1 seqlen_q=100 " + more, kH200);
  };
  EXPECT_EQ(prefill("page_size=8 dim_qk=128 causal=1 bottom_right=1 window_left=50 outputs=lse"),
            "accepts");
  EXPECT_EQ(prefill("page_size=24 dim_qk=40 softmax=learnable"), "accepts");
  EXPECT_EQ(prefill("page_size=1024 dim_qk=192 dim_v=128 q_form=padded"), "accepts");
  EXPECT_EQ(prefill("page_size=16 dim_qk=256 max_ctas=3 has_scale=1 scale=0.5"), "accepts");
  const std::string rows =
      "the queries of a sequence and a head of k and v are 800; needs at most ";
  EXPECT_EQ(prefill("page_size=4 dim_qk=128"),
            "page_size is 4, no multiple of 8, where " + rows + "64");
  EXPECT_EQ(prefill("page_size=16 dim_qk=128 softcap=9 alibi=standard has_scale=1 scale=-1"),
            "accepts");
  EXPECT_EQ(prefill("page_size=16 dim_qk=128 bias=post_scale"),
            "kv_form is paged and the problem has a bias, where " + rows + "64");
  EXPECT_EQ(prefill("page_size=16 dim_qk=128 kv_dtype=e4m3"),
            "kv_dtype is e4m3, where " + rows + "16");
  EXPECT_EQ(prefill("page_size=16 dim_qk=128 batch_invariant=1"),
            "batch_invariant is 1, where " + rows + "64");
}

// The number of ragged queries is known for a run only.
TEST(HopperEngine, KnowsWhichRunsOfAPagedProblemItServes) {
  const auto serves_rows = [](const std::string& page_size, int64_t rows) {
    const Problem p = Problem::parse(
        "dtype=bf16 kv_form=paged q_form=ragged heads_q=8 heads_kv=1 "
        "dim_qk=128 page_size=" +
        page_size);
    tea::Run run{};
    run.size = default_geometry(p);
    run.size.batch = 1, run.size.max_q = rows;
    return serves(p, run);
  };
  EXPECT_TRUE(serves_rows("1", 8));
  EXPECT_FALSE(serves_rows("1", 9));
  EXPECT_TRUE(serves_rows("16", 9));
}

TEST(HopperEngine, RefusesOtherDevices) {
  EXPECT_EQ(answer("", {}), "device is the host; it runs on GPUs of compute capability 9.0");
  EXPECT_EQ(answer("", {0, 80, 108, 163 * 1024}), "compute capability is 80 tenths; needs 90");
}

TEST(HopperEngine, RefusesByNameWhatItDoesNotKnow) {
  EXPECT_EQ(answer("", kH200, "dtype=fp32 dim_qk=64"), "dtype is fp32; needs fp16, bf16");
  EXPECT_EQ(answer("", kH200, "dtype=e4m3 dim_qk=64 o_dtype=bf16"),
            "dtype is e4m3; needs fp16, bf16");
}

TEST(HopperEngine, RefusesWhatTheCopyEngineCannotAddress) {
  EXPECT_EQ(answer("q=65540,1024,16"),
            "a stride of q is 65540; needs a multiple of 8, less than 2^39");
  EXPECT_EQ(answer("alignment=8"), "alignment is 8; needs 16 or more");
  EXPECT_EQ(
      answer("", kH200, "dtype=fp16 dim_qk=264"),
      "dim_qk is 264 and dim_v 264; needs at most 256, or in decoding 513 to 576 and at most 512");
}

TEST(HopperEngine, SaysWhichBackwardPassesItsKernelsDoNotServe) {
  const auto limit = [](const std::string& more) {
    return backward_limit(Problem::parse("dtype=bf16 training=1" + std::string(kSizes) + more));
  };
  EXPECT_EQ(limit("dim_qk=128 causal=1 window_left=9 deterministic=1"), "");
  EXPECT_EQ(limit("dim_qk=64 dim_v=80 q_form=padded softmax=learnable lse_gradient=1"), "");
  EXPECT_EQ(limit("dim_qk=128 dqkv_dtype=fp32"), "");
  EXPECT_EQ(limit("dim_qk=128 o_dtype=fp32 dout_dtype=bf16"), "");
  EXPECT_EQ(limit("dim_qk=128 dout_dtype=fp32"), "dout_dtype is fp32; backward needs bf16, as q");
  EXPECT_EQ(limit("dim_qk=136"), "dim_qk is 136 and dim_v 136; needs at most 128");
  EXPECT_EQ(limit("dim_qk=64 bias=post_scale"),
            "the problem has a bias, ALiBi or a soft cap; needs none");
  EXPECT_EQ(limit("dim_qk=64 dropout=0.1"), "the problem has dropout; needs none");
  EXPECT_EQ(limit("dim_qk=64 has_scale=1 scale=0"),
            "attn_scale is 0; needs a magnitude from 2^-60 to 2^60");
  EXPECT_EQ(limit("dim_qk=64 has_scale=1 scale=-0.25"), "");
  EXPECT_EQ(limit("dim_qk=64 dk=65540,128,64"),
            "a stride of dk is 65540; needs a multiple of 8, less than 2^39");
}

// So that te-attn fuzz --training counts gradients of these kernels alone.
TEST(HopperEngine, ServesEveryRandomCaseOfTraining) {
  for (uint64_t seed = 0; seed < 3000; ++seed) {
    const kit::Case c = kit::draw_training(seed);
    const Problem p = kit::placed(c, kit::extents(c)).normalised();
    const Attempt attempt = kEngine.attempt(p, kH200);
    const auto* const refusal = std::get_if<Refusal>(&attempt);
    EXPECT_EQ(refusal ? refusal->why : backward_limit(p), "") << c.text();
  }
}

// A unit of 16 KiB for each 64 x 64 elements of dQ, and little else.
TEST(HopperEngine, NeedsMemoryOfBackwardThatIsLinearInTheRows) {
  const auto bytes = [](int rows) {
    const Problem p = Problem::parse(
        "dtype=bf16 training=1 batch=1 heads_q=16 heads_kv=16 dim_qk=128 "
        "seqlen_kv=16384 seqlen_q=" +
        std::to_string(rows));
    return workspace(p, default_geometry(p), Direction::kBackward);
  };
  EXPECT_LE(bytes(16384), uint64_t{140} << 20);
  EXPECT_NEAR(static_cast<double>(bytes(32768)) / static_cast<double>(bytes(16384)), 2, 0.01);
}

TEST(HopperEngine, NeedsMemoryOnlyForTheCounterOfUnequalTiles) {
  const std::string some = " training=1 heads_q=1 heads_kv=1 seqlen_q=9 seqlen_kv=9",
                    sizes = some + " dim_qk=128";
  EXPECT_EQ(bytes("dtype=fp16 batch=1" + sizes), 0u);
  EXPECT_EQ(bytes("dtype=fp16 batch=1 dim_qk=64" + some),
            256u);  // high tiles, of which some end early
  EXPECT_EQ(bytes("dtype=fp16 batch=1 causal=1" + sizes), 256u);
  EXPECT_EQ(bytes("dtype=fp16 o_dtype=fp32 batch=1" + sizes), 256u);
  EXPECT_EQ(bytes("dtype=fp16 batch=1 q_form=padded" + sizes), 256u);
  EXPECT_EQ(bytes("dtype=fp16 batch=0 causal=1" + sizes), 0u);
  EXPECT_EQ(bytes("dtype=fp32 batch=1 causal=1" + sizes), 0u);
}

// A slot for each CTA: 16 or 64 rows of O in fp32.
TEST(HopperEngine, NeedsMemoryOfDecodingThatDoesNotGrowWithTheKeys) {
  const std::string one = "dtype=bf16 heads_q=8 heads_kv=8 seqlen_q=1 dim_qk=128 batch=";
  EXPECT_EQ(bytes(one + "0 seqlen_kv=100"), 0u);
  EXPECT_LT(bytes(one + "1 seqlen_kv=1024"), uint64_t{1} << 20);
  EXPECT_LT(bytes(one + "64 seqlen_kv=1000000"), uint64_t{5} << 18);
}

// Memory for the largest run serves every smaller one.
TEST(HopperEngine, NeedsMemoryOfDecodingThatNeverDecreases) {
  const Problem p = Problem::parse(
      "dtype=bf16 kv_form=paged page_size=16 q_form=ragged heads_q=8 heads_kv=2 dim_qk=128");
  const auto need = [&](int64_t batch, int64_t max_q, int64_t max_kv) {
    Geometry size = default_geometry(p);
    size.batch = batch, size.max_q = max_q, size.max_kv = max_kv, size.tokens_q = batch * max_q;
    return workspace(p, size, Direction::kForward);
  };
  constexpr int64_t kRising[] = {0, 1, 4, 5, 16, 17, 100, 1000, 100000};
  for (size_t i = 1; i < std::size(kRising); ++i)
    for (const int64_t x : kRising) {
      const int64_t less = kRising[i - 1], more = kRising[i];
      EXPECT_LE(need(less, x, 1000), need(more, x, 1000)) << less << " sequences, " << x;
      EXPECT_LE(need(3, less, x), need(3, more, x)) << less << " queries, " << x << " keys";
      EXPECT_LE(need(x, 4, less), need(x, 4, more)) << x << " sequences of " << less << " keys";
    }
}

}  // namespace
}  // namespace tea::hopper
