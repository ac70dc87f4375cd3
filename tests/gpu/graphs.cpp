// CUDA graphs: capture works at the very first call, and a graph that is replayed reads lengths,
// page tables, seeds, origins and inputs anew.
#include <gtest/gtest.h>

#include <algorithm>

#include "kit/check.h"
#include "kit/mirror.h"
#include "kit/oracle_gpu.h"

namespace tea::kit {
namespace {

constexpr int kGpu = 0;

// Forward, and backward if the problem is for training, as one graph.
class Captured {
 public:
  // An engine that is named is planned before, since its plan says how much workspace it needs.
  // `ahead`: and goes forward once.
  explicit Captured(const std::string& line, const std::string& engine = "", bool ahead = false)
      : problem_(Inputs(Case::parse(line)).problem()) {
    Inputs inputs(Case::parse(line));
    if (needs_finite_padding(engine)) inputs.fill(Poison::kThree);
    workspace_ = workspace(inputs.run(0), engine);
    Mirror mirror(gpu_, inputs);
    const tea_run& run = mirror.upload(workspace_);
    tea_plan* plan = nullptr;
    if (ahead) {
      must(tea_plan_create(&problem_, kGpu, engine.c_str(), &plan));
      must(tea_forward(plan, &run));
      tea_plan_release(plan);
    }
    gpu_.wait();
    gpu_.begin_capture();
    must(tea_plan_create(&problem_, kGpu, engine.c_str(), &plan));
    must(tea_forward(plan, &run));
    if (problem_.training) must(tea_backward(plan, &run));
    gpu_.end_capture();
    pointers_.assign(run.tensors, run.tensors + TEA_TENSOR_COUNT);
    engine_ = tea_plan_engine(plan);
    tea_plan_release(plan);
  }

  // On what another case has in memory: the same problem and sizes, and so the same addresses.
  void expect_right(const std::string& line) {
    Inputs inputs(Case::parse(line));
    ASSERT_EQ(inputs.problem().text(), problem_.text());
    if (needs_finite_padding(engine_)) inputs.fill(Poison::kThree);
    Mirror mirror(gpu_, inputs);
    const tea_run& run = mirror.upload(workspace_);
    ASSERT_EQ(std::vector<void*>(run.tensors, run.tensors + TEA_TENSOR_COUNT), pointers_);
    gpu_.replay();
    mirror.fetch();
    Report report{line, engine_, {}, {}, kGpu};
    for (const std::string& what : mirror.damage()) report.failures.push_back(what);
    const bool large = problem_.seqlen_q >= 1024;
    std::vector<char> kept;
    if (problem_.drops() && engine_ == "cudnn") kept = kept_by(Case::parse(line), engine_, kGpu);
    compare(inputs, report, large ? oracle::solve_on_gpu : oracle::solve, kept);
    EXPECT_TRUE(report.ok()) << report.text();
  }

 private:
  uint64_t workspace(const tea_run& run, const std::string& engine) const {
    uint64_t forward = 0, backward = 0;
    if (engine.empty()) {
      must(tea_workspace_bound(&problem_, &run, &forward, &backward));
      return std::max(forward, backward);
    }
    for (const Direction d : {Direction::kForward, Direction::kBackward})
      forward = std::max(forward, workspace_for(problem_, run, kGpu, engine, d));
    return forward;
  }
  static void must(tea_status status) {
    if (status != TEA_OK) throw std::runtime_error(tea_error());
  }
  Gpu& gpu_ = gpu_of_thread(kGpu);
  Problem problem_;
  uint64_t workspace_ = 0;
  std::vector<void*> pointers_;
  std::string engine_;
};

struct Pair {
  const char *name, *problem, *first, *second;
};

// For the harness: alone in its process, so that the capture is the library's first call. Planning
// what is captured second may load cuDNN.
TEST(FirstCall, CanBeCaptured) {
  for (const std::string more : {"dim_qk=64 batch=2 seqlen_q=200 seqlen_kv=200 | seed=",
                                 "dim_qk=128 batch=2 seqlen_q=2060 seqlen_kv=2060 | seed="}) {
    const std::string line = "dtype=bf16 training=1 causal=1 heads_q=4 heads_kv=2 " + more;
    Captured graph(line + "1");
    graph.expect_right(line + "2");
  }
}

class Graph : public testing::TestWithParam<Pair> {};

TEST_P(Graph, ReadsEverythingAnewWhenItIsReplayed) {
  const std::string first = std::string(GetParam().problem) + " | " + GetParam().first;
  const std::string second = std::string(GetParam().problem) + " | " + GetParam().second;
  Captured graph(first);
  graph.expect_right(first);
  graph.expect_right(second);
  graph.expect_right(first);
}

// Each engine's first run of sizes that its plan knows.
TEST(EngineGraph, CanBeCapturedAtOnceByName) {
  const std::string line =
      "dtype=bf16 training=1 causal=1 heads_q=8 heads_kv=4 dim_qk=128 batch=1 seqlen_q=2064 "
      "seqlen_kv=2064 | seed=";
  for (const std::string& engine : engines_of(kGpu)) {
    SCOPED_TRACE(engine);
    Captured graph(line + "1", engine);
    graph.expect_right(line + "2 values=outliers");
  }
}

// A graph keeps the kernels that it launches: cuDNN's are unloaded with their plan.
TEST(EngineGraph, OutlivesThePlanItWasCapturedFrom) {
  const std::string line =
      "dtype=bf16 training=1 causal=1 heads_q=8 heads_kv=4 dim_qk=128 batch=1 seqlen_q=2072 "
      "seqlen_kv=2072 | seed=";
  for (const std::string& engine : engines_of(kGpu)) {
    SCOPED_TRACE(engine);
    tea_cache_info before{};
    tea_cache_stats(&before);
    Captured graph(line + "1", engine);
    tea_cache_limit(0);
    const std::string other =
        "dtype=bf16 training=1 causal=1 heads_q=2 heads_kv=2 dim_qk=64 "
        "batch=1 seqlen_q=2072 seqlen_kv=2072";
    EXPECT_TRUE(check(Case::parse(other), engine, {.device = kGpu, .solve = oracle::solve_on_gpu})
                    .ok());  // loads and unloads where the plan's kernels were
    graph.expect_right(line + "2 values=outliers");
    tea_cache_limit(before.capacity);
  }
}

// A refusal of backward, or of building its graph in a capture, would come when forward has run.
TEST(EngineGraph, OfCudnnKnowsBackwardOnceForwardRan) {
  const std::vector<std::string> engines = engines_of(kGpu);
  if (!std::ranges::count(engines, "cudnn")) GTEST_SKIP() << "cuDNN was not found";
  const std::string line =
      "dtype=bf16 training=1 q_form=ragged kv_form=ragged causal=1 heads_q=4 heads_kv=2 dim_qk=64 "
      "| max_q=130 max_kv=130 ";
  Captured graph(line + "lens_q=5,130,0,65 lens_kv=5,130,0,65 seed=1", "cudnn", true);
  graph.expect_right(line + "lens_q=65,0,5,130 lens_kv=65,0,5,130 seed=2");
}

// The dropout and the scales of cuDNN by name: what its graph reads is on the device.
TEST(EngineGraph, OfCudnnReadsSeedsAndScalesAnew) {
  const std::vector<std::string> engines = engines_of(kGpu);
  if (!std::ranges::count(engines, "cudnn")) GTEST_SKIP() << "cuDNN was not found";
  const std::string sizes = "heads_q=4 heads_kv=2 dim_qk=128 batch=1 seqlen_q=128 seqlen_kv=128 ";
  for (const std::string& line :
       {"dtype=bf16 training=1 dropout=0.5 " + sizes + "| seed=",
        "dtype=e4m3 training=1 causal=1 " + sizes + "| scales=own seed="}) {
    Captured graph(line + "1", "cudnn");
    graph.expect_right(line + "1");
    graph.expect_right(line + "2");
  }
}

INSTANTIATE_TEST_SUITE_P(
    Pairs, Graph,
    testing::Values(Pair{"Dense",
                         "dtype=fp16 training=1 heads_q=2 heads_kv=1 dim_qk=64 batch=2 seqlen_q=70 "
                         "seqlen_kv=130 outputs=lse+max",
                         "seed=1", "seed=2 values=outliers"},
                    Pair{"Square",  // of head dimensions where two engines may share the work
                         "dtype=bf16 training=1 causal=1 heads_q=8 heads_kv=2 dim_qk=128 batch=1 "
                         "seqlen_q=2100 seqlen_kv=2100",
                         "seed=1", "seed=2 values=outliers"},
                    Pair{"Seeds",
                         "dtype=bf16 training=1 dropout=0.5 heads_q=2 heads_kv=2 dim_qk=32 batch=1 "
                         "seqlen_q=90 seqlen_kv=90 causal=1",
                         "seed=1", "seed=2"},
                    Pair{"Origins",
                         "dtype=bf16 training=1 dropout=0.1 alibi=standard causal=1 heads_q=2 "
                         "heads_kv=2 dim_qk=32 batch=1 seqlen_q=90 seqlen_kv=90",
                         "seed=1 origin=0,0,40,8 origin_in_memory=1",
                         "seed=1 origin=3,1,17,0 origin_in_memory=1"},
                    Pair{"OriginsOfSequences",
                         "dtype=bf16 training=1 dropout=0.1 alibi=standard causal=1 heads_q=2 "
                         "heads_kv=2 dim_qk=32 batch=3 seqlen_q=90 seqlen_kv=90",
                         "seed=1 origin=0,0,40,8 origin_step=1,0,3,5,7",
                         "seed=1 origin=3,1,17,0 origin_step=0,2,9,1,-4"},
                    Pair{"RaggedLengths",
                         "dtype=fp16 training=1 q_form=ragged kv_form=ragged causal=1 "
                         "bottom_right=1 heads_q=4 heads_kv=2 dim_qk=64 deterministic=1",
                         "lens_q=5,130,0,65 lens_kv=64,200,7,3 max_q=130 max_kv=200 seed=1",
                         "lens_q=65,0,5,130 lens_kv=3,64,200,7 max_q=130 max_kv=200 seed=2"},
                    Pair{"PaddedLengths",
                         "dtype=fp32 training=1 q_form=padded kv_form=padded heads_q=2 "
                         "heads_kv=2 dim_qk=40 batch=3 seqlen_q=70 seqlen_kv=130 "
                         "bias=post_scale softmax=learnable",
                         "lens_q=70,0,33 lens_kv=130,64,1 seed=1",
                         "lens_q=1,70,70 lens_kv=0,130,129 seed=2"},
                    Pair{"PageTables",
                         "dtype=bf16 q_form=ragged kv_form=paged page_size=16 heads_q=8 "
                         "heads_kv=2 dim_qk=128 causal=1 bottom_right=1 outputs=lse",
                         "lens_q=1,3,1 lens_kv=700,33,64 max_kv=704 seed=1 spare_pages=2",
                         "lens_q=3,1,1 lens_kv=33,700,64 max_kv=704 seed=9 spare_pages=2"},
                    Pair{"Fp8Scales",
                         "dtype=e4m3 o_dtype=bf16 training=1 heads_q=2 heads_kv=2 dim_qk=64 "
                         "batch=1 seqlen_q=100 seqlen_kv=100 causal=1",
                         "seed=1 scales=own", "seed=2 scales=own"}),
    [](const auto& test) { return std::string(test.param.name); });

}  // namespace
}  // namespace tea::kit
