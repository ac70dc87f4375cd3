// The engine of cuDNN: what it refuses before it asks cuDNN, its capacities and its errata, none of
// which need a GPU. What it computes is tested by tests/gpu.
#include <gtest/gtest.h>

#include "cudnn/bucket.h"
#include "cudnn/engine.h"
#include "cudnn/errata.h"
#include "cudnn/faster.h"
#include "kit/answer.h"

namespace tea::cudnn {
namespace {

using kit::kH200;
constexpr const char* kSizes = " batch=2 heads_q=4 heads_kv=2 seqlen_q=64 seqlen_kv=64 ";

std::string answer(const std::string& more, const Device& device = kH200,
                   const std::string& what = "dtype=bf16 dim_qk=128") {
  return kit::answer(kCudnn, what + kSizes + more, device);
}

bool starts_with(const std::string& text, const std::string& with) {
  return text.rfind(with, 0) == 0;
}

TEST(CudnnEngine, RunsOnlyWhereItIsNamed) { EXPECT_TRUE(kCudnn.only_by_name); }

TEST(CudnnEngine, RefusesDevicesItHasNoKernelsFor) {
  EXPECT_EQ(answer("", {}), "device is the host; it runs on a GPU");
  EXPECT_EQ(answer("", {0, 75, 40, 64 * 1024}), "device is sm_75; needs sm_80 or later");
}

TEST(CudnnEngine, RefusesByNameWhatItDoesNotKnow) {
  EXPECT_EQ(answer("", kH200, "dtype=fp32 dim_qk=64"),
            "dtype is fp32; needs fp16, bf16, e4m3, e5m2");
  EXPECT_EQ(answer("softcap=20"), "softcap is 20; it does not know this field");
  EXPECT_EQ(answer("bias=pre_scale"), "bias is pre_scale; needs none, post_scale");
  EXPECT_EQ(answer("alibi=slopes causal=1"), "alibi is slopes; needs none, standard");
  EXPECT_EQ(answer("training=1 lse_gradient=1"), "lse_gradient is 1; it does not know this field");
}

TEST(CudnnEngine, RefusesWhatWouldBreakTheContract) {
  EXPECT_EQ(answer("alignment=8"), "alignment is 8; needs 16 or more");
  EXPECT_EQ(answer("q=33024,516,129"), "a stride of q is 516; needs a multiple of 8");
  EXPECT_EQ(answer("training=1 dk=16640,260,128"), "a stride of dk is 260; needs a multiple of 8");
  EXPECT_TRUE(starts_with(answer("softmax=learnable outputs=max"), "outputs are max"));
  EXPECT_TRUE(starts_with(answer("scale=-0.5 has_scale=1"), "scale is -0.5"));
  EXPECT_TRUE(starts_with(answer("scale=0 has_scale=1"), "scale is 0"));
  EXPECT_TRUE(starts_with(answer("window_left=2000000000"), "a window is 1999999999"));
}

TEST(CudnnEngine, RefusesWhatItsGraphsOfFp8HaveNoPlaceFor) {
  const auto why = [](const std::string& more, const Device& device = kH200) {
    return answer(more, device, "dtype=e4m3 dim_qk=128");
  };
  EXPECT_EQ(why("", {0, 89, 142, 99 * 1024}), "device is sm_89; fp8 needs sm_90 or later");
  EXPECT_EQ(why("bias=post_scale"), "it has a bias or ALiBi; fp8 needs none");
  EXPECT_TRUE(starts_with(why("training=1 dropout=0.5"), "dropout is 0.5"));
  EXPECT_EQ(why("dim_v=64"), "dim_v is 64; fp8 needs that of dim_qk, 128");
  const Problem ragged =
      Problem::parse("dtype=e4m3 dim_qk=128 heads_q=2 heads_kv=2 q_form=ragged kv_form=ragged");
  EXPECT_EQ(std::get<Refusal>(plan_with({}, ragged, kH200)).why,
            "a form is ragged or paged; fp8 needs dense or padded");
  EXPECT_EQ(why("q=33280,520,130"), "a stride of q is 520; needs a multiple of 16");
  EXPECT_EQ(why("o_dtype=bf16 o=33536,524,128"), "a stride of o is 524; needs a multiple of 8");
}

TEST(CudnnEngine, RefusesRaggedGradientsThatLieElsewhere) {
  const std::string ragged =
      "dtype=bf16 dim_qk=64 heads_q=2 heads_kv=2 training=1 q_form=ragged kv_form=ragged";
  const auto why = [&](const std::string& more) {
    const Attempt attempt = plan_with({}, Problem::parse(ragged + more).normalised(), kH200);
    return std::get<Refusal>(attempt).why;
  };
  EXPECT_TRUE(starts_with(why(" dq=0,256,64"), "strides of dq, dk, dv or dout differ"));
  EXPECT_TRUE(starts_with(why(" q=0,256,64 dq=0,256,64"), "cuDNN was not found"));
  // 24 and 3 heads of 32, head after head (draw 2000046 of plain problems)
  const std::string shared = "dtype=fp16 training=1 q_form=ragged kv_form=ragged dim_qk=32 ";
  const auto apart = [&](const std::string& more) {
    return std::get<Refusal>(plan_with({}, Problem::parse(shared + more).normalised(), kH200)).why;
  };
  const std::string keys = " k=0,32,1152 v=0,32,1152 dk=0,32,1152 dv=0,32,1152";
  EXPECT_TRUE(starts_with(apart("heads_q=24 heads_kv=3" + keys), "heads of dk or dv lie apart"));
  EXPECT_TRUE(starts_with(apart("heads_q=3 heads_kv=3" + keys), "cuDNN was not found"));
  EXPECT_TRUE(starts_with(apart("heads_q=24 heads_kv=3"), "cuDNN was not found"));
  // one head may lie anywhere (draw 7008767)
  EXPECT_TRUE(starts_with(apart("heads_q=8 heads_kv=1" + keys), "cuDNN was not found"));
  // side by side, but farther apart than the rows of the sums have room for
  EXPECT_TRUE(starts_with(apart("heads_q=4 heads_kv=2 k=0,80,48 v=0,80,48 dk=0,80,48 dv=0,80,48"),
                          "heads of dk or dv lie apart"));
}

TEST(CudnnEngine, RefusesTheBiasesThatCudnnGetsWrong) {
  EXPECT_EQ(answer("bias=post_scale bias_broadcast=row"),
            "bias_broadcast has a row or column; needs batch and head only");
  EXPECT_TRUE(starts_with(answer("training=1 bias=post_scale bias_broadcast=batch"),
                          "bias_broadcast is not 0; training needs 0"));
  const Problem ragged = Problem::parse(
      "dtype=bf16 dim_qk=64 heads_q=2 heads_kv=2 q_form=ragged kv_form=ragged bias=post_scale");
  EXPECT_EQ(std::get<Refusal>(plan_with({}, ragged, kH200)).why,
            "a form is ragged or paged; a bias needs sizes that the problem gives");
  EXPECT_EQ(answer("training=1 bias=post_scale q_form=padded kv_form=padded"),
            "a form is not dense; a gradient of the bias needs both dense");
}

// Whatever is installed here.
TEST(CudnnEngine, RefusesWithoutALibraryOrWithAnOldOne) {
  const Problem p = Problem::parse(std::string("dtype=bf16 dim_qk=128") + kSizes).normalised();
  const auto why = [&](const Library& found) {
    return std::get<Refusal>(plan_with(found, p, kH200)).why;
  };
  EXPECT_EQ(why({nullptr, "no such file", 0}), "cuDNN was not found: no such file");
  int symbols = 0;
  EXPECT_EQ(why({&symbols, "", 90300}), "cuDNN is 90300; needs 90800 or later");
  EXPECT_TRUE(starts_with(why({&symbols, "", 91000}), "a known error of cuDNN: "));
}

constexpr const char* kSquare =
    "dtype=bf16 dim_qk=256 batch=32 heads_q=4 heads_kv=2 seqlen_q=512 seqlen_kv=512 ";
Problem square(const std::string& more = "training=1") {
  return Problem::parse(kSquare + more).normalised();
}

TEST(CudnnFaster, SpeaksOfGradientsWithoutOptionsOnly) {
  EXPECT_TRUE(is_plain(square()));
  EXPECT_TRUE(is_plain(square("training=1 causal=1 outputs=max")));
  EXPECT_FALSE(is_plain(square("")));
  Problem half = square();
  half.dtype = TEA_FP16;
  EXPECT_FALSE(is_plain(half));
  half.heads_kv = half.heads_q;
  EXPECT_TRUE(is_plain(half));
  for (const char* more : {"deterministic=1", "q_form=padded", "kv_form=padded", "window_left=9",
                           "window_right=9", "bias=post_scale", "alibi=standard causal=1",
                           "softmax=off_by_one", "softcap=20", "dropout=0.1", "lse_gradient=1"})
    EXPECT_FALSE(is_plain(square(std::string("training=1 ") + more))) << more;
  const auto plain = [](const std::string& text) { return is_plain(Problem::parse(text)); };
  EXPECT_FALSE(plain("dtype=fp32 dim_qk=64 training=1 batch=1 seqlen_q=512 seqlen_kv=512"));
  EXPECT_FALSE(plain("dtype=bf16 dim_qk=64 training=1 batch=1 seqlen_q=512 seqlen_kv=513"));
  EXPECT_FALSE(plain("dtype=bf16 dim_qk=64 training=1 batch=0 seqlen_q=512 seqlen_kv=512"));
}

// A row holds for its GPU from the first to the last of its versions.
template <class Holds>
void expect_range(int sm, size_t first, size_t last, const Holds& holds) {
  EXPECT_TRUE(holds(first, sm));
  EXPECT_TRUE(holds(last, sm));
  EXPECT_FALSE(holds(first - 1, sm));
  EXPECT_FALSE(holds(last + 1, sm));
  EXPECT_FALSE(holds(first, sm + 10));
}

TEST(CudnnFaster, HoldsForWhatWasMeasured) {
  constexpr Faster rows[] = {{90, 91900, 91999, 256, 256, 256, 2 * 4 * 512 * 512}};
  Problem p = square();
  expect_range(90, 91900, 91999,
               [&](size_t version, int sm) { return has_row(p, sm, version, rows); });
  p.dim_v = 64;
  EXPECT_FALSE(has_row(p, rows));
  p = square(), p.batch = 100, p.seqlen_q = p.seqlen_kv = 255;
  EXPECT_FALSE(has_row(p, rows));
  p = square(), p.batch = 1;
  EXPECT_FALSE(has_row(p, rows));
}

TEST(CudnnFaster, HasRowsOfFp8ForInferenceWithMoreHeadDimensions) {
  const auto holds = [](const char* training, int dim) {
    Problem p = Problem::parse(
        "dtype=e4m3 batch=1 seqlen_q=16384 seqlen_kv=16384 heads_q=16 "
        "heads_kv=8 causal=1 training=" +
        std::string(training));
    p.dim_qk = dim;
    p = p.normalised();
    return is_plain_fp8(p) && has_row(p, 90, 91900, fp8_rows(p));
  };
  EXPECT_TRUE(holds("1", 128));
  EXPECT_TRUE(holds("0", 128));
  for (const int dim : {64, 256}) {
    EXPECT_TRUE(holds("0", dim)) << dim;
    EXPECT_FALSE(holds("1", dim)) << dim;
  }
  EXPECT_FALSE(holds("0", 192));
  EXPECT_FALSE(is_plain_fp8(square()));
}

TEST(CudnnFaster, SaysWhyBackwardIsNotCudnns) {
  const auto why = [](const Problem& p) { return std::get<Refusal>(plan_backward(p, kH200)).why; };
  EXPECT_TRUE(starts_with(why(square("training=1 window_left=9")), "it has options"));
  Problem small = square();
  small.dim_qk = 40;
  EXPECT_EQ(
      why(small),
      "dim_qk is 40, dim_v 40, seqlen_q 512, batch 32 and heads_q 4; cuDNN's backward pass was "
      "not measured to be faster there");
  EXPECT_TRUE(starts_with(why(square("training=1 alignment=8")), "alignment is 8"));
}

TEST(CudnnFaster, AsksForWorkspaceWhereItHasARowOnly) {
  const auto bytes = [](const Problem& p) { return backward_workspace(p, default_geometry(p)); };
  EXPECT_GT(bytes(square()), 0u);  // less than by name: of sm_90
  EXPECT_LT(bytes(square()), workspace(square(), default_geometry(square()), Direction::kBackward));
  EXPECT_EQ(bytes(square("training=1 deterministic=1")), 0u);
  EXPECT_EQ(bytes(square("")), 0u);
}

// Masks that an origin moves are for another engine's backward pass; others are where they were.
TEST(CudnnOrigin, IsTakenWhereItMovesNoMask) {
  tea::Run run{};
  const Problem causal = square("training=1 causal=1"), full = square();
  EXPECT_TRUE(takes_origin(causal, run));
  run.origin[2] = run.origin[3] = 64;
  EXPECT_TRUE(takes_origin(causal, run));
  run.origin[2] = 65;
  EXPECT_FALSE(takes_origin(causal, run));
  EXPECT_TRUE(takes_origin(full, run));
  const int64_t device[4] = {};
  run.origin[2] = 64, run.origin_device = device;
  EXPECT_FALSE(takes_origin(causal, run));
  EXPECT_TRUE(takes_origin(full, run));
}

// All four numbers of an origin move the contract's dropout, and cuDNN's knows of none.
TEST(CudnnOrigin, IsNotTakenWithDropout) {
  const Problem drops = square("training=1 dropout=0.5");
  tea::Run run{};
  EXPECT_TRUE(takes_origin(drops, run));
  for (int64_t& n : run.origin) {
    n = 1;
    EXPECT_FALSE(takes_origin(drops, run));
    n = 0;
  }
  const int64_t device[4] = {};
  run.origin_device = device;
  EXPECT_FALSE(takes_origin(drops, run));
}

TEST(CudnnCapacity, KeepsWhatTheProblemGives) {
  const Problem p =
      Problem::parse("dtype=bf16 heads_q=1 heads_kv=1 dim_qk=64 batch=3 seqlen_q=77 seqlen_kv=99");
  EXPECT_EQ(capacity_of(p, default_geometry(p)), (Capacity{3, 77, 99, 0, 0, 0, 0, 0}));
}

TEST(CudnnCapacity, RoundsUpWhatRunsGiveByAnEighthAtMost) {
  for (int64_t n = 1; n < 70000; n = n * 5 / 4 + 1) {
    const int64_t up = rounded_up(n, kRowStep);
    EXPECT_GE(up, n);
    EXPECT_EQ(up % kRowStep, 0);
    EXPECT_EQ(rounded_up(up, kRowStep), up) << n;
    EXPECT_LE(up - n, std::max(kRowStep - 1, n / 8)) << n;
  }
}

TEST(CudnnCapacity, GrowsTheBatchOnlyWhereNoRowOfAnEmptySequenceIsWritten) {
  Geometry size{};
  size.batch = 17, size.max_q = size.max_kv = 100, size.tokens_q = size.tokens_kv = 1000;
  const auto batch = [&](const char* forms) {
    return capacity_of(
               Problem::parse(std::string("dtype=bf16 heads_q=1 heads_kv=1 dim_qk=64 ") + forms),
               size)
        .batch;
  };
  EXPECT_EQ(batch("q_form=ragged kv_form=ragged"), 18);
  EXPECT_EQ(batch("q_form=ragged kv_form=padded seqlen_kv=100"), 17);
  EXPECT_EQ(batch("q_form=padded kv_form=ragged seqlen_q=100"), 17);
}

// 61,441 sequences were rounded up to 65,536, which are too many, and refused by that number.
TEST(CudnnCapacity, GrowsTheBatchToTheMostThatRuns) {
  const Problem p =
      Problem::parse("dtype=bf16 heads_q=1 heads_kv=1 dim_qk=64 q_form=ragged kv_form=ragged");
  const auto batch = [&p](int64_t n) {
    Geometry size{};
    size.batch = n, size.max_q = size.max_kv = 1, size.tokens_q = size.tokens_kv = n;
    return capacity_of(p, size).batch;
  };
  EXPECT_EQ(batch(61440), 61440);
  EXPECT_EQ(batch(61441), kMostSequences);
  EXPECT_EQ(batch(65535), kMostSequences);
  EXPECT_EQ(batch(65537), 65537);
}

TEST(CudnnErrata, ApplyToTheirVersionsAndGpusOnly) {
  constexpr Erratum rows[] = {
      {90100, 90200, 90, 90, [](const Problem& p) { return p.bias != 0; }, "", ""}};
  Problem p = Problem::parse("dtype=bf16 heads_q=1 heads_kv=1 dim_qk=64 bias=post_scale");
  expect_range(90, 90100, 90200,
               [&](size_t version, int sm) { return erratum(p, version, sm, rows) != nullptr; });
  p.bias = 0;
  EXPECT_FALSE(erratum(p, 90100, 90, rows));
}

bool has_erratum(const std::string& what, size_t version, int sm) {
  return erratum(Problem::parse(what), version, sm) != nullptr;
}

TEST(CudnnErrata, HoldThePublicReports) {
  const auto applies = [](const std::string& more, size_t version, int sm = 90) {
    return has_erratum("dtype=bf16 heads_q=2 heads_kv=2 batch=1 " + more, version, sm);
  };
  // what cudnn-frontend itself refuses
  EXPECT_TRUE(applies("dim_qk=64 seqlen_q=64 seqlen_kv=64", 91000));
  EXPECT_TRUE(applies("dim_qk=64 seqlen_q=64 seqlen_kv=64", 91001));
  EXPECT_FALSE(applies("dim_qk=64 seqlen_q=64 seqlen_kv=64", 91002));
  EXPECT_TRUE(applies("dim_qk=64 window_left=9 seqlen_q=64 seqlen_kv=2048", 91400));
  EXPECT_FALSE(applies("dim_qk=64 window_left=9 seqlen_q=64 seqlen_kv=1024", 91400));
  EXPECT_FALSE(applies("dim_qk=64 window_left=9 seqlen_q=64 seqlen_kv=2048", 91401));
  // pytorch#196678
  EXPECT_TRUE(applies("dim_qk=64 training=1 bias=post_scale seqlen_q=192 seqlen_kv=192", 91900));
  EXPECT_FALSE(
      applies("dim_qk=64 training=1 bias=post_scale seqlen_q=192 seqlen_kv=192", 91900, 100));
  // cudnn-frontend#1072
  EXPECT_TRUE(applies("dim_qk=64 training=1 seqlen_q=1 seqlen_kv=64", 92501));
  EXPECT_FALSE(applies("dim_qk=64 training=1 seqlen_q=1 seqlen_kv=128", 91900));
  // Automodel#3232
  EXPECT_TRUE(
      applies("dim_qk=256 training=1 causal=1 window_left=9 seqlen_q=64 seqlen_kv=64", 91900));
  EXPECT_FALSE(applies("dim_qk=256 causal=1 window_left=9 seqlen_q=64 seqlen_kv=64", 91900));
}

// LSE of one query had other bits from call to call where other kernels ran; 9.19 on an H100.
TEST(CudnnErrata, HoldOneQueryThatMustRepeatItsBits) {
  const auto holds = [](const std::string& more) {
    return has_erratum("dtype=bf16 heads_q=8 heads_kv=1 dim_qk=128 " + more, 91900, 90);
  };
  const std::string dense = "batch=1 seqlen_kv=1030 ";
  EXPECT_TRUE(holds(dense + "seqlen_q=1 deterministic=1"));
  EXPECT_TRUE(holds("kv_form=paged page_size=16 seqlen_q=1 deterministic=1"));
  EXPECT_FALSE(holds(dense + "seqlen_q=1"));
  EXPECT_FALSE(holds(dense + "seqlen_q=2 deterministic=1"));
}

TEST(CudnnErrata, HoldTheReportsOfTilesThatAreNotWhole) {
  const auto applies = [](const std::string& more, size_t version) {
    return has_erratum("dtype=bf16 heads_q=2 heads_kv=2 batch=1 dim_qk=64 " + more, version, 90);
  };
  // cudnn-frontend#628, seen with 9.19
  EXPECT_TRUE(applies("training=1 seqlen_q=832 seqlen_kv=832", 91900));
  EXPECT_TRUE(applies("training=1 seqlen_q=100 seqlen_kv=192", 91900));
  EXPECT_TRUE(applies("training=1 seqlen_q=193 seqlen_kv=192 causal=1", 91900));
  EXPECT_TRUE(applies("training=1 seqlen_q=192 seqlen_kv=192 window_right=2", 91900));
  EXPECT_FALSE(applies("training=1 seqlen_q=192 seqlen_kv=192 causal=1", 91900));
  EXPECT_FALSE(applies("training=1 seqlen_q=193 seqlen_kv=192 causal=1 bottom_right=1", 91900));
  EXPECT_FALSE(applies("training=1 seqlen_q=100 seqlen_kv=192 window_right=90", 91900));
  EXPECT_FALSE(applies("training=1 seqlen_q=256 seqlen_kv=256", 91900));
  EXPECT_FALSE(applies("training=1 seqlen_q=192 seqlen_kv=200", 91900));
  EXPECT_FALSE(applies("seqlen_q=832 seqlen_kv=832", 91900));
  EXPECT_FALSE(applies("training=1 kv_form=padded seqlen_q=192 seqlen_kv=192", 91900));
  // cudnn-frontend 1.16
  EXPECT_TRUE(applies("training=1 seqlen_q=128 seqlen_kv=200", 91500));
  EXPECT_FALSE(applies("training=1 seqlen_q=128 seqlen_kv=200", 91501));
  EXPECT_FALSE(applies("training=1 seqlen_q=200 seqlen_kv=128", 91500));
  EXPECT_FALSE(applies("seqlen_q=128 seqlen_kv=200", 91500));
  EXPECT_FALSE(
      applies("training=1 q_form=padded kv_form=padded seqlen_q=128 seqlen_kv=200", 91500));
}

TEST(CudnnErrata, HoldTheReportsOfRaggedGradients) {
  const auto applies = [](const std::string& more, size_t version, int sm) {
    return has_erratum("dtype=bf16 heads_q=2 heads_kv=2 dim_qk=64 " + more, version, sm);
  };
  const std::string ragged = "q_form=ragged kv_form=ragged ", trains = ragged + "training=1";
  // TransformerEngine#2186
  EXPECT_TRUE(applies(trains, 91701, 90));
  EXPECT_FALSE(applies(trains, 91800, 90));
  EXPECT_FALSE(applies(trains, 91701, 100));
  EXPECT_FALSE(applies(ragged, 91701, 90));
  // TransformerEngine#3333
  EXPECT_TRUE(applies(trains, 91900, 120));
  EXPECT_FALSE(applies(ragged, 91900, 120));
  EXPECT_FALSE(applies("training=1 batch=1 seqlen_q=128 seqlen_kv=128", 91900, 120));
}

TEST(CudnnErrata, HoldTheReportsOfOneQuery) {
  const auto applies = [](const std::string& more, size_t version, int sm) {
    return has_erratum("dtype=bf16 dim_qk=64 batch=1 seqlen_kv=128 " + more, version, sm);
  };
  // the notes of cuDNN 9.18.1
  EXPECT_TRUE(applies("heads_q=64 heads_kv=8 seqlen_q=1 causal=1", 91801, 90));
  EXPECT_FALSE(applies("heads_q=64 heads_kv=8 seqlen_q=1 causal=1", 91900, 90));
  EXPECT_FALSE(applies("heads_q=64 heads_kv=8 seqlen_q=1", 91801, 90));
  EXPECT_FALSE(applies("heads_q=64 heads_kv=8 seqlen_q=2 causal=1", 91801, 90));
  EXPECT_FALSE(applies("heads_q=8 heads_kv=8 seqlen_q=1 causal=1", 91801, 90));
  // pytorch#193893
  EXPECT_TRUE(applies("heads_q=28 heads_kv=4 seqlen_q=1", 91900, 100));
  EXPECT_FALSE(applies("heads_q=28 heads_kv=4 seqlen_q=1", 91900, 90));
  EXPECT_FALSE(applies("heads_q=32 heads_kv=8 seqlen_q=1", 91900, 100));
  EXPECT_FALSE(applies("heads_q=4 heads_kv=4 seqlen_q=1", 91900, 100));
}

// cudnn-frontend#981
TEST(CudnnErrata, HoldTheReportOfLargeHeadsInFp8) {
  const auto applies = [](const std::string& more, int sm) {
    return has_erratum("heads_q=2 heads_kv=2 batch=1 seqlen_q=128 seqlen_kv=128 dim_qk=256 " + more,
                       92700, sm);
  };
  EXPECT_TRUE(applies("dtype=e4m3", 100));
  EXPECT_TRUE(applies("dtype=e5m2", 103));
  EXPECT_FALSE(applies("dtype=e4m3", 90));
  EXPECT_FALSE(applies("dtype=bf16", 100));
}

TEST(CudnnErrata, HoldWhatDrawsFound) {
  const auto applies = [](const std::string& more) {
    return erratum(Problem::parse("dtype=bf16 heads_q=2 heads_kv=2 " + more), 91900, 90) != nullptr;
  };
  const std::string ragged = "q_form=ragged kv_form=ragged ";
  EXPECT_TRUE(applies(ragged + "dim_qk=192 dim_v=16 training=1"));
  EXPECT_FALSE(applies(ragged + "dim_qk=192 dim_v=16"));
  EXPECT_FALSE(applies(ragged + "dim_qk=128 training=1"));
  const std::string dense = "batch=1 seqlen_q=128 seqlen_kv=128 ";
  EXPECT_TRUE(applies(dense + "dim_qk=64 training=1 deterministic=1 softmax=learnable"));
  EXPECT_FALSE(applies(dense + "dim_qk=64 training=1 softmax=learnable"));
  EXPECT_FALSE(applies(dense + "dim_qk=512 outputs=max"));
  EXPECT_FALSE(applies(dense + "dim_qk=256 training=1"));
  Problem biased = Problem::parse(
      "dtype=bf16 heads_q=2 heads_kv=2 batch=1 seqlen_q=29 seqlen_kv=29 dim_qk=64 training=1 "
      "bias=post_scale");
  EXPECT_FALSE(erratum(biased, 91900, 90));
  biased.dtype = TEA_FP16;
  EXPECT_TRUE(erratum(biased, 91900, 90));
  biased.training = 0;
  EXPECT_FALSE(erratum(biased, 91900, 90));
  EXPECT_TRUE(applies(dense + "dim_qk=64 training=1 softmax=off_by_one dropout=0.3"));
  EXPECT_FALSE(applies(dense + "dim_qk=64 training=1 dropout=0.3"));
  const auto fp8 = [](const std::string& more) {
    const Problem p = Problem::parse(
        "dtype=e4m3 heads_q=2 heads_kv=2 batch=1 seqlen_q=64 seqlen_kv=64 dim_qk=64 " + more);
    return erratum(p, 91900, 90) != nullptr;
  };
  EXPECT_TRUE(fp8("outputs=max"));
  EXPECT_FALSE(fp8("outputs=lse"));
  EXPECT_TRUE(fp8("softmax=learnable"));
  EXPECT_TRUE(fp8("softmax=off_by_one"));
  EXPECT_TRUE(fp8("training=1"));
  const auto whole = [](const std::string& more) {
    return erratum(Problem::parse("dtype=e4m3 training=1 heads_q=2 heads_kv=2 batch=1 dim_qk=128 "
                                  "seqlen_q=128 seqlen_kv=256 " +
                                  more),
                   91900, 90) == nullptr;
  };
  EXPECT_TRUE(whole(""));
  EXPECT_FALSE(whole("q_form=padded"));
  EXPECT_FALSE(whole("kv_form=padded"));
}

}  // namespace
}  // namespace tea::cudnn
