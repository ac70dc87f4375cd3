// The fixed matrix that compute-sanitizer watches: small shapes that between them run every kernel,
// each tensor in an allocation of its own, compared with the oracle too. test_gpu.py runs Sanitized
// under each tool but racecheck, which is slower by far: that one runs Races, a part of the matrix.
// initcheck reports every read of sums that bulk copies wrote, so it watches Hopper's backward
// kernel in Initialized alone, a smaller part.
#include <gtest/gtest.h>

#include "kit/check.h"

namespace tea::kit {
namespace {

constexpr int kGpu = 0;

using Words = std::vector<std::string>;

// Each type with each head dimension and each kind of scores.
Words kernels(const Words& types, const Words& dims, const Words& scores, int rows = 35) {
  Words out;
  for (const std::string& type : types)
    for (const std::string& dim : dims)
      for (const std::string& score : scores)
        for (const char* const order : {"", " deterministic=1"})
          out.push_back(
              type + " training=1 heads_q=1 heads_kv=1 batch=1 seqlen_q=" + std::to_string(rows) +
              " seqlen_kv=70 " + dim + " " + score + order + " | seed=3");
  return out;
}

// The kernel variants of the portable engine: plain scores, and all others.
const Words kScores = {"causal=1",
                       "softcap=20 dropout=0.2 bias=post_scale bias_broadcast=batch alignment=4"};

// The kernel variants of the Hopper engine: no mask, a mask, a soft cap, dropout, and all others;
// those for a bias take it in two ways. Short sequences have kernels of their own.
Words kernels_of_hopper() {
  const Words types = {"dtype=bf16", "dtype=fp16"};
  Words lines = kernels(types, {"dim_qk=64"}, {"", "causal=1"}, 200);
  for (const Words& more : {kernels(types, {"dim_qk=256"}, {"causal=1"}, 1030),
                            kernels(types, {"dim_qk=64", "dim_qk=128", "dim_qk=256"},
                                    {"causal=1 softcap=2", "causal=1 dropout=0.2"})})
    lines.insert(lines.end(), more.begin(), more.end());
  const Words others = kernels(
      types,
      {"dim_qk=64", "dim_qk=96", "dim_qk=128", "dim_qk=192 dim_v=128", "dim_qk=192", "dim_qk=256"},
      {"", "causal=1", "softcap=20 dropout=0.2 alibi=standard", "bias=post_scale",
       "causal=1 bias=pre_scale bias_stride=2520,2520,72,1"});
  lines.insert(lines.end(), others.begin(), others.end());
  return lines;
}

// The decoding kernels: each type with each head dimension, of one query of a group and of several
// queries, over tiles that CTAs share; dense, and of lengths in device memory with pages; and those
// of one query with keys and values in FP8.
Words decoding_kernels_of_hopper() {
  const std::string fewer = "heads_q=8 heads_kv=2 seqlen_q=1 ",
                    more = "heads_q=14 heads_kv=2 seqlen_q=7 causal=1 bottom_right=1 ",
                    dense = "batch=1 seqlen_kv=420 ",
                    pages = "kv_form=paged page_size=16 outputs=lse ";
  Words out;
  for (const char* const type : {"dtype=bf16 ", "dtype=fp16 "})
    for (const char* const dim :
         {"dim_qk=64", "dim_qk=128", "dim_qk=192 dim_v=128", "dim_qk=256"}) {
      for (const std::string& rows : {fewer, more}) {
        out.push_back(type + rows + dense + dim);
        out.push_back(type + rows + pages + dim + " | lens_kv=300,0,40 spare_pages=1");
      }
      out.push_back(type + fewer + dense + "kv_dtype=e4m3 kv_scale=head " + dim + " | scales=own");
      out.push_back(type + fewer + pages + "kv_dtype=e5m2 " + dim +
                    " | lens_kv=300,0,40 spare_pages=1 scales=own");
    }
  return out;
}

// The forward kernels over pages: each type with each head dimension, windows that begin within a
// page, queries of no sequence.
Words paged_kernels_of_hopper() {
  Words out;
  for (const char* const type : {"dtype=bf16 ", "dtype=fp16 "})
    for (const char* const dim :
         {"dim_qk=64", "dim_qk=128", "dim_qk=192 dim_v=128", "dim_qk=256"}) {
      const std::string what =
          std::string(type) + "heads_q=4 heads_kv=2 kv_form=paged causal=1 bottom_right=1 " + dim;
      out.push_back(what +
                    " page_size=16 seqlen_q=140 outputs=lse | lens_kv=300,0,40 spare_pages=1");
      out.push_back(what +
                    " page_size=64 q_form=ragged gaps=1 window_left=20 softmax=learnable | "
                    "lens_q=70,0,130 lens_kv=80,5,200 gap=2 tail=3 spare_pages=1");
      out.push_back(what +
                    " page_size=32 seqlen_q=140 softcap=20 alibi=standard | lens_kv=300,0,40 "
                    "spare_pages=1");
    }
  return out;
}

// Forms, splits of the keys, and the secondary passes.
constexpr const char* kForms[] = {
    "dtype=bf16 training=1 q_form=ragged kv_form=ragged gaps=1 causal=1 heads_q=2 heads_kv=2 "
    "dim_qk=64 | lens_q=3,0,70 lens_kv=80,5,70 gap=2 tail=3",
    "dtype=fp16 training=1 q_form=padded kv_form=padded heads_q=3 heads_kv=1 dim_qk=40 batch=2 "
    "seqlen_q=20 seqlen_kv=70 softmax=learnable outputs=lse+max+sum_exp | lens_q=20,3 lens_kv=1,70",
    "dtype=bf16 training=1 causal=1 heads_q=4 heads_kv=1 dim_qk=128 batch=1 seqlen_q=150 "
    "seqlen_kv=300 softmax=learnable lse_gradient=1",
    "dtype=fp16 q_form=ragged kv_form=paged page_size=16 causal=1 bottom_right=1 heads_q=8 "
    "heads_kv=1 dim_qk=128 outputs=lse | lens_q=1,2 lens_kv=300,40 spare_pages=1",
    "dtype=bf16 heads_q=4 heads_kv=4 dim_qk=128 batch=1 seqlen_q=1 seqlen_kv=3000",
    // Decoding: a tile of more CTAs than are added at once, and pages of one slot.
    "dtype=bf16 heads_q=1 heads_kv=1 dim_qk=64 batch=1 seqlen_q=1 seqlen_kv=6000 outputs=lse",
    "dtype=bf16 heads_q=4 heads_kv=2 dim_qk=64 kv_form=paged page_size=1 seqlen_q=1 softcap=20 "
    "alibi=standard | lens_kv=300,0,40 spare_pages=1",
    "dtype=fp32 heads_q=4 heads_kv=1 dim_qk=64 batch=1 seqlen_q=2 seqlen_kv=2000 outputs=lse",
    "dtype=e4m3 o_dtype=bf16 heads_q=4 heads_kv=1 dim_qk=64 batch=1 seqlen_q=2 seqlen_kv=1500",
    "dtype=bf16 training=1 heads_q=2 heads_kv=2 dim_qk=32 batch=2 seqlen_q=40 seqlen_kv=50 "
    "bias=pre_scale bias_broadcast=head+row lse_gradient=1",
    "dtype=fp16 training=1 heads_q=2 heads_kv=2 dim_qk=32 batch=2 seqlen_q=40 seqlen_kv=50 "
    "bias=post_scale alibi=slopes",
    // A group of heads in parts, whose tiles have more steps than a pipeline has stages.
    "dtype=bf16 training=1 causal=1 heads_q=4 heads_kv=1 dim_qk=64 batch=1 seqlen_q=300 "
    "seqlen_kv=300",
    // More tiles than SMs, of different lengths: CTAs fetch them.
    "dtype=bf16 training=1 causal=1 heads_q=150 heads_kv=150 dim_qk=64 batch=1 seqlen_q=9 "
    "seqlen_kv=9",
    "dtype=e4m3 training=1 heads_q=2 heads_kv=2 dim_qk=64 batch=1 seqlen_q=70 seqlen_kv=50 "
    "softmax=off_by_one | scales=own",
    // Parts of problems: results in fp32, an origin for each sequence.
    "dtype=bf16 o_dtype=fp32 training=1 dout_dtype=bf16 dqkv_dtype=fp32 q_form=ragged "
    "kv_form=ragged gaps=1 causal=1 heads_q=4 heads_kv=2 dim_qk=128 | lens_q=70,0,130 "
    "lens_kv=80,5,140 gap=2 tail=3 origin_step=0,0,20,7,-5",
    "dtype=fp16 o_dtype=fp32 training=1 dout_dtype=fp16 dqkv_dtype=fp32 causal=1 heads_q=4 "
    "heads_kv=1 dim_qk=64 batch=1 seqlen_q=200 seqlen_kv=150 deterministic=1 | shift=-20",
};

// The kernels of the largest head dimensions, which have no backward pass: those of the portable
// engine, and those of multi-head latent attention, whose CTAs share a tile.
constexpr const char* kLargestDims[] = {
    "dtype=bf16 heads_q=16 heads_kv=1 dim_qk=576 dim_v=512 batch=1 seqlen_q=1 seqlen_kv=2500 "
    "outputs=lse",
    "dtype=fp16 heads_q=70 heads_kv=1 dim_qk=576 dim_v=512 kv_form=paged page_size=16 seqlen_q=1 "
    "| lens_kv=1500,0,40 spare_pages=1",
    "dtype=fp32 heads_q=2 heads_kv=1 dim_qk=768 batch=1 seqlen_q=5 seqlen_kv=40 outputs=lse",
    "dtype=e4m3 o_dtype=bf16 heads_q=1 heads_kv=1 dim_qk=1024 batch=1 seqlen_q=5 seqlen_kv=70 | "
    "scales=own",
};

// The engine for any GPU takes all lines; another one may refuse a line.
void expect_agreement(const Words& lines, const std::string& engine, int shared_bytes = 0) {
  for (const std::string& line : lines) {
    const Report report =
        check(Case::parse(line), engine,
              {.device = kGpu, .around = Around::kAllocations, .shared_bytes = shared_bytes});
    EXPECT_TRUE(report.ok() || (report.refused && engine != "portable")) << report.text();
  }
}

// By every engine of the GPU; by the one for any GPU again with as little shared memory as smaller
// GPUs have, where it may choose other kernels.
TEST(Sanitized, EveryKernelRuns) {
  Words lines = kernels(
      {"dtype=bf16", "dtype=fp16", "dtype=fp32", "dtype=e4m3 o_dtype=bf16 dqkv_dtype=bf16",
       "dtype=e5m2 o_dtype=fp16 dqkv_dtype=bf16"},
      {"dim_qk=64", "dim_qk=128", "dim_qk=192 dim_v=128", "dim_qk=256", "dim_qk=512"}, kScores);
  lines.insert(lines.end(), std::begin(kForms), std::end(kForms));
  lines.insert(lines.end(), std::begin(kLargestDims), std::end(kLargestDims));
  expect_agreement(lines, "portable", 99 << 10);
  for (const std::string& engine : engines_of(kGpu)) {
    if (engine == "cudnn") continue;  // its kernels are not ours to sanitize
    expect_agreement(lines, engine);
    if (engine != "hopper") continue;
    expect_agreement(kernels_of_hopper(), engine);
    expect_agreement(decoding_kernels_of_hopper(), engine);
    expect_agreement(paged_kernels_of_hopper(), engine);
  }
}

// One tile of each head dimension, and groups of heads in parts.
TEST(Initialized, BackwardOfHopper) {
  const std::string tile = "dtype=bf16 training=1 heads_kv=1 batch=1 seqlen_q=35 seqlen_kv=70 ";
  expect_agreement({tile + "heads_q=1 dim_qk=64", tile + "heads_q=1 dim_qk=96 causal=1",
                    tile + "heads_q=1 dim_qk=128", tile + "heads_q=2 dim_qk=64"},
                   "hopper");
}

// The order of a kernel's threads does not depend on how its numbers are coded: one type for each
// scheme (two bytes, four, one), the least and the largest head dimensions and one between, every
// form.
TEST(Races, OneOfEachScheme) {
  Words lines = kernels({"dtype=bf16", "dtype=fp32", "dtype=e4m3 o_dtype=bf16 dqkv_dtype=bf16"},
                        {"dim_qk=64", "dim_qk=192 dim_v=128", "dim_qk=512"}, kScores);
  lines.insert(lines.end(), std::begin(kForms), std::end(kForms));
  for (const std::string& engine : engines_of(kGpu))
    if (engine != "cudnn") expect_agreement(lines, engine);
}

}  // namespace
}  // namespace tea::kit
