// kFlash: the engine that users get on a CPU. Random cases, long tiles that the random ones do not
// reach, splits, and results that do not depend on the number of threads.
#include <gtest/gtest.h>

#include <array>
#include <cstdio>
#include <filesystem>
#include <thread>

#include "core/plan.h"
#include "cpu/flash.h"
#include "cpu/fuzz.h"
#include "kit/inputs.h"

namespace tea::cpu {
namespace {

TEST(Flash, RandomCasesAgreeWithTheOracle) { expect_agreement("cpu", 1000, 1500); }

TEST(Flash, AcceptsOnlyTheHost) {
  for (const Engine& e : {kFlash, kFlashAvx512, kFlashAvx2, kFlashGeneric})
    EXPECT_TRUE(std::holds_alternative<Refusal>(e.plan(Problem{}, Device{0, 90}))) << e.name;
}

void expect_right(const std::string& line) {
  const kit::Report report = kit::check(kit::Case::parse(line), "cpu");
  EXPECT_TRUE(report.ok()) << report.text();
}

// Several tiles and blocks in both directions, with edges that fall everywhere.
TEST(Flash, ManyTiles) {
  for (const char* options :
       {"", "causal=1", "causal=1 bottom_right=1", "window_left=70 window_right=3",
        "causal=1 window_left=130 bias=post_scale alibi=standard softcap=20 softmax=learnable",
        "dropout=0.2 causal=1 lse_gradient=1", "bias=pre_scale bias_broadcast=batch+row"})
    for (const char* sizes :
         {"batch=2 seqlen_q=129 seqlen_kv=200", "batch=1 seqlen_q=300 seqlen_kv=65",
          "batch=1 seqlen_q=64 seqlen_kv=128"})
      expect_right("dtype=bf16 training=1 heads_q=4 heads_kv=2 dim_qk=72 dim_v=40 " +
                   std::string(sizes) + " " + options + " | seed=3 values=randn");
}

// Decoding: one row, many keys, which are split and merged.
TEST(Flash, FewRowsAndManyKeys) {
  for (const char* options : {"", "softmax=off_by_one", "window_left=900 bottom_right=1",
                              "outputs=lse+max+sum_exp alibi=standard bottom_right=1"})
    for (const char* values : {"randn", "outliers"})
      expect_right(std::string("dtype=fp16 heads_q=8 heads_kv=1 dim_qk=64 batch=1 seqlen_q=1 "
                               "seqlen_kv=3000 ") +
                   options + " | seed=4 values=" + values);
}

// The kernel of few rows: every type, every number of rows up to the change to tiles, in every form
// and layout, with head dimensions that end within a vector.
TEST(Flash, FewRowsOfEveryKind) {
  kit::say_share("types and numbers of rows");
  int number = 0;
  for (const char* type : {"bf16", "fp16", "fp32", "e4m3 scales", "e5m2 scales", "fp64"})
    for (const int rows : {1, 2, 3, 7, 16, 17}) {
      if (number++ % kit::kEvery) continue;
      const std::string name(type, 4), fp8 = std::string(type).size() > 4 ? " scales=own" : "";
      const std::string head = "dtype=" + name +
                               " heads_kv=1 outputs=lse+max heads_q=" + std::to_string(rows) +
                               " causal=1 bottom_right=1 ";
      expect_right(head +
                   "dim_qk=72 dim_v=40 batch=1 seqlen_q=1 seqlen_kv=1500 bias=pre_scale "
                   "softcap=9 alibi=standard | seed=5 layout=odd" +
                   fp8);
      expect_right(head +
                   "dim_qk=64 kv_form=paged page_size=7 seqlen_q=1 window_left=900 | "
                   "lens_kv=3000,5,600 seed=6" +
                   fp8);
    }
}

// Enough keys that heads of a sequence with adjacent keys are interleaved.
TEST(Flash, FewRowsOfHeadsTogether) {
  std::vector<std::string> engines = kit::host_engines();
  std::erase(engines, "reference");
  for (const std::string type : {"bf16", "fp16", "e4m3 scales", "fp32"}) {
    const std::string fp8 = type.size() > 4 ? " scales=own" : "";
    const std::string head = "dtype=" + type.substr(0, 4) +
                             " heads_q=6 heads_kv=3 outputs=lse+max causal=1 bottom_right=1 "
                             "dim_qk=72 dim_v=40 seqlen_q=1 ";
    for (const char* rest :
         {"batch=1 seqlen_kv=9001 | seed=5", "batch=2 seqlen_kv=9000 | seed=5 layout=bhsd",
          "kv_form=paged page_size=16 | lens_kv=9000,5,6000 seed=6"})
      for (const kit::Report& report : kit::check(kit::Case::parse(head + rest + fp8), engines))
        EXPECT_TRUE(report.ok()) << report.text();
  }
}

// Only dsink needs the sink in backward: LSE holds it already.
TEST(Flash, BackwardWithoutDsinkNeedsNoSink) {
  for (const std::string& engine : kit::host_engines()) {
    kit::Inputs inputs(kit::Case::parse(
        "dtype=fp32 training=1 heads_q=4 heads_kv=2 dim_qk=16 batch=2 seqlen_q=9 seqlen_kv=70 "
        "softmax=learnable | seed=6 values=randn omit_optional=1"));
    const PlanRef plan = planner().plan(inputs.problem(), kHost, engine);
    const auto gradients = [&](bool with_sink) {
      inputs.fill(kit::Poison::kNan);
      tea_run run = inputs.run(0);
      forward(*plan, &run);
      std::vector<void*> tensors(run.tensors, run.tensors + run.tensor_count);
      run.tensors = tensors.data();
      if (!with_sink) tensors[TEA_SINK] = nullptr;
      backward(*plan, &run);
      return inputs.output_bytes(kit::Written::kBackward);
    };
    EXPECT_EQ(gradients(false), gradients(true)) << engine;
  }
}

// x / cap may be subnormal then. The oracle bounds the error relative to the cap, which says
// little.
TEST(Flash, AHugeSoftcapIsAlmostNone) {
  for (const std::string& engine : kit::host_engines()) {
    const auto output = [&](const char* softcap, int64_t i) {
      kit::Inputs inputs(kit::Case::parse(
          "dtype=fp32 heads_q=1 heads_kv=1 dim_qk=16 batch=1 seqlen_q=9 seqlen_kv=70 " +
          std::string(softcap) + " | seed=7 values=randn"));
      inputs.fill(kit::Poison::kNan);
      const tea_run& run = inputs.run(0);
      forward(*planner().plan(inputs.problem(), kHost, engine), &run);
      return inputs.value(TEA_O, {0, 0, i / 16, i % 16});
    };
    for (int64_t i = 0; i < 9 * 16; ++i)
      ASSERT_NEAR(output("softcap=3e38", i), output("", i), 1e-6) << engine;
  }
}

// Subnormal values were taken as zero when they were loaded, and what dropout kept of them was
// lost.
TEST(Flash, DropoutKeepsSubnormalValues) {
  for (const char* line :
       {"dtype=bf16 training=1 outputs=lse q_form=ragged kv_form=ragged heads_q=2 heads_kv=2 "
        "dim_qk=256 bias=pre_scale bias_broadcast=batch+head+row softcap=0.5 dropout=0.9 scale=1 "
        "has_scale=1 | lens_q=64,64 lens_kv=1,1 seed=34052331 values=denormal",
        "dtype=bf16 training=1 lse_gradient=1 q_form=ragged kv_form=ragged gaps=1 heads_q=24 "
        "heads_kv=3 dim_qk=16 dropout=0.99999 | lens_q=36 lens_kv=36 max_q=43 gap=3 seed=32003358 "
        "values=denormal",
        "dtype=bf16 training=1 deterministic=1 lse_gradient=1 q_form=ragged kv_form=ragged gaps=1 "
        "heads_q=6 heads_kv=3 dim_qk=64 window_right=6 bias=pre_scale dropout=0.99999 alignment=4 "
        "| lens_q=25,25 lens_kv=3,25 seed=32060158 values=denormal layout=interleaved2 "
        "bias_mean=100"})
    for (const std::string& engine : kit::host_engines()) {
      const kit::Report report = kit::check(kit::Case::parse(line), engine);
      EXPECT_TRUE(report.ok()) << report.text();
    }
}

// Nothing to read, to write or to loop over.
TEST(Flash, ABatchWithoutRowsMayBeOfAnySize) {
  for (const std::string& engine : kit::host_engines()) {
    const PlanRef plan =
        planner().plan(Problem::parse("dtype=fp32 training=1 heads_q=2 heads_kv=2 dim_qk=8 "
                                      "batch=4611686018427387904 seqlen_q=0 seqlen_kv=0 "
                                      "bias=post_scale bias_broadcast=row"),
                       kHost, engine);
    std::array<void*, TEA_TENSOR_COUNT> tensors{};
    alignas(16) std::array<float, 4> unused{};
    tensors[TEA_DBIAS] = unused.data();
    tea_run run{};
    run.struct_size = sizeof run;
    run.tensors = tensors.data(), run.tensor_count = TEA_TENSOR_COUNT;
    EXPECT_NO_THROW(forward(*plan, &run)) << engine;
    EXPECT_NO_THROW(backward(*plan, &run)) << engine;
  }
}

TEST(Flash, PackedHeadsOfOneGroupShareABlock) {
  expect_right(
      "dtype=fp32 training=1 heads_q=12 heads_kv=1 dim_qk=16 batch=2 seqlen_q=7 "
      "seqlen_kv=90 causal=1 bottom_right=1 softmax=learnable | seed=5 values=randn");
}

using ParallelFor = std::remove_pointer_t<tea_parallel_for>;
void serial(void* calls, int64_t count, void (*body)(void*, int64_t), void* argument) {
  ++*static_cast<int*>(calls);
  for (int64_t i = 0; i < count; ++i) body(argument, i);
}
void reversed(void* calls, int64_t count, void (*body)(void*, int64_t), void* argument) {
  ++*static_cast<int*>(calls);
  for (int64_t i = count; i-- > 0;) body(argument, i);
}
void one_thread_each(void* calls, int64_t count, void (*body)(void*, int64_t), void* argument) {
  ++*static_cast<int*>(calls);
  std::vector<std::thread> threads;
  for (int64_t i = 0; i < count; ++i) threads.emplace_back(body, argument, i);
  for (std::thread& t : threads) t.join();
}

// Splits, merges, bias strips and decoding, fp8 too.
constexpr const char* kManyPieces[] = {
    "dtype=fp32 training=1 heads_q=4 heads_kv=2 dim_qk=32 batch=2 seqlen_q=200 seqlen_kv=300 "
    "causal=1 bias=post_scale bias_broadcast=batch softmax=learnable dropout=0.1 | seed=1",
    "dtype=bf16 training=1 heads_q=4 heads_kv=2 dim_qk=72 batch=2 seqlen_q=200 seqlen_kv=300 "
    "causal=1 bottom_right=1 softcap=20 | seed=3",
    "dtype=bf16 heads_q=8 heads_kv=1 dim_qk=64 batch=1 seqlen_q=1 seqlen_kv=5000 outputs=lse | "
    "seed=2",
    "dtype=e4m3 heads_q=8 heads_kv=2 dim_qk=64 batch=1 seqlen_q=1 seqlen_kv=3000 | seed=3 "
    "scales=own",
    "dtype=bf16 heads_q=1 heads_kv=1 dim_qk=64 batch=1 seqlen_q=40 seqlen_kv=3000 outputs=max | "
    "seed=4",
    "dtype=bf16 heads_q=8 heads_kv=4 dim_qk=64 batch=1 seqlen_q=1 seqlen_kv=9000 outputs=lse | "
    "seed=5",
    "dtype=e5m2 heads_q=8 heads_kv=4 dim_qk=40 batch=1 seqlen_q=1 seqlen_kv=9000 | seed=6 "
    "scales=own",
    "dtype=fp32 heads_q=8 heads_kv=4 dim_qk=64 batch=1 seqlen_q=1 seqlen_kv=9000 | seed=7",
    "dtype=e4m3 o_dtype=fp32 heads_q=8 heads_kv=4 dim_qk=64 batch=1 seqlen_q=1 seqlen_kv=9000 | "
    "seed=8 scales=own"};

// Every output, on the caller's threads if there are such.
std::vector<uint8_t> bytes_of(kit::Inputs& inputs, const char* engine, ParallelFor* on = nullptr) {
  inputs.fill(kit::Poison::kNan);
  const PlanRef plan = planner().plan(inputs.problem(), kHost, engine);
  tea_run run = inputs.run(0);
  int calls = 0;
  if (on) run.parallel_for = on, run.parallel_context = &calls;
  forward(*plan, &run);
  if (plan->problem.training) backward(*plan, &run);
  EXPECT_EQ(calls > 0, on != nullptr) << engine;
  std::vector<uint8_t> out = inputs.output_bytes(kit::Written::kForward);
  if (plan->problem.training)
    for (const uint8_t byte : inputs.output_bytes(kit::Written::kBackward)) out.push_back(byte);
  return out;
}

TEST(Flash, ComputesTheSameOnTheThreadsOfTheCaller) {
  for (const char* line : kManyPieces) {
    kit::Inputs inputs(kit::Case::parse(line));
    for (const std::string& engine : kit::host_engines()) {
      if (engine == "reference") continue;  // it has no work to share
      const std::vector<uint8_t> own = bytes_of(inputs, engine.c_str());
      for (ParallelFor* on : {serial, reversed, one_thread_each})
        EXPECT_EQ(bytes_of(inputs, engine.c_str(), on), own) << engine << ": " << line;
    }
  }
}

// The same bits with one thread and with many: the child processes print a digest of their outputs.
TEST(Flash, ResultsDoNotDependOnTheNumberOfThreads) {
  const auto digest = [](const char* threads) {
    const std::string command = "TE_ATTENTION_THREADS=" + std::string(threads) + " " +
                                std::filesystem::read_symlink("/proc/self/exe").string() +
                                " --digest";
    FILE* pipe = popen(command.c_str(), "r");
    char line[64] = "";
    EXPECT_TRUE(pipe && fgets(line, sizeof line, pipe));
    EXPECT_EQ(pclose(pipe), 0);
    return std::string(line);
  };
  const std::string one = digest("1");
  EXPECT_GT(one.size(), 8u);
  for (const char* threads : {"2", "3", "8"}) EXPECT_EQ(digest(threads), one) << threads;
}

uint64_t digest_of_outputs() {
  uint64_t digest = 14695981039346656037u;
  for (const char* line : kManyPieces) {
    kit::Inputs inputs(kit::Case::parse(line));
    for (const uint8_t byte : bytes_of(inputs, "cpu")) digest = (digest ^ byte) * 1099511628211u;
  }
  return digest;
}

}  // namespace
}  // namespace tea::cpu

int main(int argc, char** argv) {
  if (argc > 1 && std::string_view(argv[1]) == "--digest") {
    std::printf("%016llx\n", static_cast<unsigned long long>(tea::cpu::digest_of_outputs()));
    return 0;
  }
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
