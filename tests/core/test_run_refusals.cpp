// The refusals of runs, as one table: the argument, the value seen, the value needed; and
// that nothing was written, neither to a tensor nor outside one.
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <memory>

#include "core/tensors.h"
#include "kit/inputs.h"

namespace tea {
namespace {

using kit::Inputs;

// Together these use every tensor that there is.
constexpr const char* kRagged =
    "dtype=bf16 training=1 q_form=ragged kv_form=ragged gaps=1 heads_q=4 heads_kv=2 dim_qk=16 "
    "bias=post_scale alibi=slopes softmax=learnable dropout=0.5 lse_gradient=1 "
    "outputs=max+sum_exp | lens_q=3,2 lens_kv=4,1 gap=1";
constexpr const char* kPaged =
    "dtype=bf16 kv_form=paged page_size=4 heads_q=4 heads_kv=2 dim_qk=16 seqlen_q=1 outputs=lse | "
    "lens_kv=9,2";
constexpr const char* kFp8 =
    "dtype=e4m3 training=1 heads_q=2 heads_kv=2 dim_qk=16 batch=1 seqlen_q=3 seqlen_kv=3 | "
    "scales=own";
constexpr const char* kDense =
    "dtype=bf16 training=1 heads_q=2 heads_kv=2 dim_qk=16 batch=1 seqlen_q=3 seqlen_kv=3";

// A run that may be changed, with its own array of pointers.
struct Call {
  tea_run run;
  std::array<void*, TEA_TENSOR_COUNT + 2> tensor{};
};

struct Prepared {
  Inputs inputs;
  tea_plan* plan = nullptr;
  Call call{};

  explicit Prepared(const char* line) : inputs(kit::Case::parse(line)) {
    EXPECT_EQ(tea_plan_create(&inputs.problem(), -1, "reference", &plan), TEA_OK) << tea_error();
    uint64_t need[2] = {};
    EXPECT_EQ(tea_workspace_bound(&inputs.problem(), &inputs.run(0), &need[0], &need[1]), TEA_OK);
    call.run = inputs.run(std::max(need[0], need[1]));
    std::copy_n(call.run.tensors, TEA_TENSOR_COUNT, call.tensor.begin());
    call.run.tensors = call.tensor.data();
  }
  ~Prepared() { tea_plan_release(plan); }
  Prepared(const Prepared&) = delete;

  tea_status execute(bool backward) {
    return backward ? tea_backward(plan, &call.run) : tea_forward(plan, &call.run);
  }
};

void expect_refused(Prepared& p, bool backward, const std::string& seen,
                    const std::string& needed) {
  EXPECT_EQ(p.execute(backward), TEA_INVALID) << seen;
  const std::string message = tea_error();
  EXPECT_NE(message.find(seen), std::string::npos) << message << "\n  wanted: " << seen;
  EXPECT_NE(message.find("needs " + needed), std::string::npos)
      << message << "\n  wanted: needs " << needed;
  EXPECT_TRUE(p.inputs.untouched()) << seen << ": memory was written";
}

struct Row {
  const char* line;
  void (*change)(Call&);
  const char* seen;
  const char* needed;
};
class RunRefusal : public testing::TestWithParam<Row> {};
TEST_P(RunRefusal, NamesArgumentSeenAndNeededAndWritesNothing) {
  for (const bool backward : {false, true}) {
    Prepared p(GetParam().line);
    if (backward && !p.inputs.problem().training) continue;
    GetParam().change(p.call);
    expect_refused(p, backward, GetParam().seen, GetParam().needed);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Sizes, RunRefusal,
    testing::Values(
        Row{kDense, [](Call& c) { c.run.batch = 1; }, "run.batch is 1", "0: the problem itself"},
        Row{kDense, [](Call& c) { c.run.max_q = 3; }, "run.max_q is 3", "0: the problem itself"},
        Row{kDense, [](Call& c) { c.run.max_kv = 3; }, "run.max_kv is 3", "0: the problem itself"},
        Row{kDense, [](Call& c) { c.run.tokens_q = 3; }, "run.tokens_q is 3", "0: the problem"},
        Row{kDense, [](Call& c) { c.run.tokens_kv = 3; }, "run.tokens_kv is 3", "0: the problem"},
        Row{kDense, [](Call& c) { c.run.pages_k = 3; }, "run.pages_k is 3", "0: the problem"},
        Row{kRagged, [](Call& c) { c.run.pages_v = 3; }, "run.pages_v is 3", "0: the problem"},
        Row{kPaged, [](Call& c) { c.run.max_q = 1; }, "run.max_q is 1", "0: the problem itself"},
        Row{kPaged, [](Call& c) { c.run.tokens_q = 2; }, "run.tokens_q is 2", "0: the problem"},
        Row{kPaged, [](Call& c) { c.run.tokens_kv = 2; }, "run.tokens_kv is 2", "0: the problem"},
        Row{kRagged, [](Call& c) { c.run.batch = -1; }, "run.batch is -1", "0 or more"},
        Row{kRagged, [](Call& c) { c.run.max_q = -1; }, "run.max_q is -1", "0 or more"},
        Row{kRagged, [](Call& c) { c.run.max_kv = -5; }, "run.max_kv is -5", "0 or more"},
        Row{kRagged, [](Call& c) { c.run.tokens_q = -1; }, "run.tokens_q is -1", "0 or more"},
        Row{kRagged, [](Call& c) { c.run.tokens_kv = -1; }, "run.tokens_kv is -1", "0 or more"},
        Row{kPaged, [](Call& c) { c.run.pages_k = -1; }, "run.pages_k is -1", "0 or more"},
        Row{kPaged, [](Call& c) { c.run.pages_v = -1; }, "run.pages_v is -1", "0 or more"},
        Row{kPaged, [](Call& c) { c.run.pages_k = 0; }, "run.pages_k is 0", "at least 1 page"},
        Row{kPaged, [](Call& c) { c.run.pages_v = 0; }, "run.pages_v is 0", "at least 1 page"},
        Row{kRagged, [](Call& c) { c.run.max_q = INT64_MAX; }, "is larger than 2^60", "a smaller"},
        Row{kRagged, [](Call& c) { c.run.tokens_kv = INT64_MAX; }, "is larger than 2^60",
            "a smaller extent"},
        Row{kDense, [](Call& c) { c.run.partial = 2; }, "run.partial is 2", "0 or 1"},
        Row{kDense, [](Call& c) { c.run.accumulate = 4; }, "run.accumulate is 4", "0 "},
        Row{kDense, [](Call& c) { c.run.accumulate = 1; }, "run.accumulate is 1",
            "0: tea_plan_accumulates() is 0"},
        Row{kDense, [](Call& c) { c.run.origin_stride = 5; }, "run.origin_stride is 5",
            "0 without origin_device"},
        Row{kDense,
            [](Call& c) {
              static const int64_t zero[4] = {};
              c.run.origin_device = zero, c.run.origin_stride = 4;
            },
            "run.origin_stride is 4", "0, or at least 5"},
        Row{kDense,
            [](Call& c) {
              static const int64_t zero[5] = {};
              c.run.origin_device = zero, c.run.origin_stride = 5, c.run.shift = 2;
            },
            "run.shift is 2", "0 with origin_stride"},
        Row{kDense, [](Call& c) { c.run.shift = -(int64_t{1} << 41); },
            "run.shift is -2199023255552", "-2^40 to 2^40"},
        Row{kDense, [](Call& c) { c.run.origin[0] = -1; }, "run.origin[0] is -1", "0 or more"},
        Row{kDense, [](Call& c) { c.run.origin[1] = -1; }, "run.origin[1] is -1", "0 or more"},
        Row{kDense, [](Call& c) { c.run.origin[2] = -1; }, "run.origin[2] is -1", "0 or more"},
        Row{kRagged, [](Call& c) { c.run.origin[3] = -9; }, "run.origin[3] is -9", "0 or more"},
        Row{kDense, [](Call& c) { c.run.origin[2] = (int64_t{1} << 40) + 1; },
            "run.origin[2] is 1099511627777", "0 or more, at most 2^40"},
        Row{kDense,
            [](Call& c) {
              static const int64_t zero[4] = {};
              c.run.origin[0] = 3, c.run.origin_device = zero;
            },
            "run.origin[0] is 3", "0 with origin_device"},
        Row{kDense,
            [](Call& c) {
              static const int32_t zero[9] = {};
              const bool even = reinterpret_cast<uintptr_t>(zero) % 8 == 0;
              c.run.origin_device = reinterpret_cast<const int64_t*>(zero + even);
            },
            "run.origin_device is not aligned", "an address that is a multiple of 8"},
        Row{kDense, [](Call& c) { c.run.origin[3] = INT64_MAX; }, "run.origin[3] is 92233720",
            "0 or more, at most 2^40"}));

INSTANTIATE_TEST_SUITE_P(
    Structs, RunRefusal,
    testing::Values(
        Row{kDense, [](Call& c) { c.run.struct_size = 0; }, "run.struct_size is 0", "sizeof"},
        Row{kDense, [](Call& c) { c.run.struct_size = 4; }, "run.struct_size is 4", "sizeof"},
        Row{kDense, [](Call& c) { c.run.struct_size = 15; }, "run.struct_size is 15", "sizeof"},
        Row{kDense,
            [](Call& c) {
              // The array behind the run in this Call is what a newer field would be.
              c.run.struct_size = sizeof c.run + 8;
              c.tensor[0] = &c;
            },
            "run.struct_size is", "at most"},
        Row{kDense, [](Call& c) { c.run.tensors = nullptr; }, "run.tensors is NULL", "an array"},
        Row{kDense, [](Call& c) { c.run.tensor_count = 0; }, "tensor Q is NULL", "memory for"},
        Row{kDense, [](Call& c) { c.run.tensor_count = TEA_K; }, "tensor K is NULL", "memory for"},
        Row{kDense,
            [](Call& c) {
              c.run.tensor_count = TEA_TENSOR_COUNT + 1;
              c.tensor[TEA_TENSOR_COUNT] = &c;
            },
            "run.tensors[43] is a pointer", "NULL: this library knows 43 tensors"}));

TEST(RunRefusal, NullArguments) {
  Prepared p(kDense);
  for (const auto execute : {tea_forward, tea_backward}) {
    EXPECT_EQ(execute(nullptr, &p.call.run), TEA_INVALID);
    EXPECT_NE(std::string(tea_error()).find("plan is NULL"), std::string::npos) << tea_error();
    EXPECT_EQ(execute(p.plan, nullptr), TEA_INVALID);
    EXPECT_NE(std::string(tea_error()).find("run is NULL"), std::string::npos) << tea_error();
  }
  EXPECT_TRUE(p.inputs.untouched());
}

bool required(const Inputs& inputs, tea_tensor t, bool backward) {
  const Use use =
      tensor_info(t).use(inputs.problem(), backward ? Direction::kBackward : Direction::kForward);
  return use == Use::kRequired;
}

// Every tensor that a call requires, missing; and every tensor that it takes, off by one byte.
TEST(RunRefusal, EveryRequiredTensorIsMissedByName) {
  int missed = 0;
  for (const char* line : {kRagged, kPaged, kFp8, kDense})
    for (const bool backward : {false, true})
      for (int i = 0; i < TEA_TENSOR_COUNT; ++i) {
        const auto t = static_cast<tea_tensor>(i);
        Prepared p(line);
        if (!required(p.inputs, t, backward)) continue;
        if (backward && !p.inputs.problem().training) continue;
        p.call.tensor[static_cast<size_t>(t)] = nullptr;
        expect_refused(p, backward, "tensor " + std::string(tensor_info(t).name) + " is NULL",
                       "memory for its elements");
        ++missed;
      }
  EXPECT_GE(missed, 50);
}

TEST(RunRefusal, EveryTensorIsCheckedForAlignment) {
  int checked = 0;
  for (const char* line : {kRagged, kPaged, kFp8})
    for (const bool backward : {false, true})
      for (int i = 0; i < TEA_TENSOR_COUNT; ++i) {
        const auto t = static_cast<tea_tensor>(i);
        Prepared p(line);
        const Use use = tensor_info(t).use(p.inputs.problem(),
                                           backward ? Direction::kBackward : Direction::kForward);
        void*& pointer = p.call.tensor[static_cast<size_t>(t)];
        if (use == Use::kUnused || !pointer || (backward && !p.inputs.problem().training)) continue;
        pointer = static_cast<char*>(pointer) + 1;
        expect_refused(p, backward,
                       "tensor " + std::string(tensor_info(t).name) + " is not aligned",
                       "an address that is a multiple of ");
        ++checked;
      }
  EXPECT_GE(checked, 70);
}

TEST(RunRefusal, ThePromisedAlignmentIsAskedForNoMore) {
  const std::string line = std::string(kDense);
  for (const int promised : {2, 4, 8, 32, 64}) {
    Prepared p((line + " alignment=" + std::to_string(promised)).c_str());
    EXPECT_EQ(p.execute(false), TEA_OK) << promised << ": " << tea_error();
    void*& q = p.call.tensor[TEA_Q];
    q = static_cast<char*>(q) + promised / 2;
    EXPECT_EQ(p.execute(false), TEA_INVALID);
    const std::string needed = "a multiple of " + std::to_string(promised);
    EXPECT_NE(std::string(tea_error()).find(needed), std::string::npos) << tea_error();
  }
}

// A tensor that the problem has no use for is a mistake of the caller.
TEST(RunRefusal, EveryUnusedTensorIsRefusedByName) {
  int refused = 0;
  for (const char* line : {kPaged, kFp8, kDense})
    for (int i = 0; i < TEA_TENSOR_COUNT; ++i) {
      const auto t = static_cast<tea_tensor>(i);
      Prepared p(line);
      const TensorInfo& info = tensor_info(t);
      if (info.forward(p.inputs.problem()) != Use::kUnused ||
          info.backward(p.inputs.problem()) != Use::kUnused)
        continue;
      p.call.tensor[static_cast<size_t>(t)] = p.call.tensor[TEA_Q];
      expect_refused(p, false, "tensor " + std::string(info.name) + " is a pointer",
                     "NULL: this problem does not use it");
      ++refused;
    }
  EXPECT_GE(refused, 50);
}

// Invalid values of the other arguments of the C API.
bool says(const char* fragment) {
  return std::string(tea_error()).find(fragment) != std::string::npos;
}

TEST(ApiRefusal, PlansAndEngines) {
  const Problem p = Problem::parse(kDense);
  tea_plan* plan = nullptr;
  EXPECT_EQ(tea_plan_create(&p, -1, "quantum", &plan), TEA_INVALID);
  EXPECT_TRUE(says("engine is \"quantum\"") && says("reference")) << tea_error();
  EXPECT_EQ(tea_plan_create(&p, -2, nullptr, &plan), TEA_INVALID);
  EXPECT_TRUE(says("device is -2")) << tea_error();
  EXPECT_NE(tea_plan_create(&p, 1000, nullptr, &plan), TEA_OK);
  EXPECT_TRUE(says("device is 1000")) << tea_error();
  EXPECT_EQ(tea_plan_create(&p, -1, nullptr, nullptr), TEA_INVALID);
  EXPECT_TRUE(says("plan is NULL")) << tea_error();
  EXPECT_EQ(tea_plan_create(nullptr, -1, nullptr, &plan), TEA_INVALID);
  EXPECT_TRUE(says("problem is NULL")) << tea_error();
  EXPECT_EQ(plan, nullptr);
}

TEST(ApiRefusal, BackwardOfAPlanForInference) {
  Prepared p(kPaged);
  EXPECT_EQ(tea_backward(p.plan, &p.call.run), TEA_INVALID);
  EXPECT_TRUE(says("training is 0")) << tea_error();
  EXPECT_TRUE(p.inputs.untouched());
}

TEST(RunRefusal, AStatusWordOffItsAlignment) {
  Prepared p(kDense);
  p.call.run.status = reinterpret_cast<int32_t*>(reinterpret_cast<char*>(p.call.run.status) + 1);
  expect_refused(p, false, "run.status is not aligned", "an address that is a multiple of 4");
}

TEST(RunRefusal, AMissingSinkWhereItsGradientIsWanted) {
  Prepared p(kRagged);
  p.call.tensor[TEA_SINK] = nullptr;
  expect_refused(p, true, "tensor sink is NULL",
                 "memory for its elements where tensor dsink is given");
}

TEST(ApiRefusal, OriginsOfACount) {
  Prepared p(kDense);
  tea_cost cost{};
  cost.visible = 17;
  p.call.run.origin[2] = INT64_MAX;
  EXPECT_EQ(tea_problem_cost(&p.inputs.problem(), &p.call.run, &cost), TEA_INVALID);
  EXPECT_TRUE(says("run.origin[2] is")) << tea_error();
  EXPECT_EQ(cost.visible, 17u) << "written although refused";
}

TEST(ApiRefusal, SizesThatTheProblemLeavesOpen) {
  const Problem ragged = kit::Case::parse(kRagged).problem;
  uint64_t forward = 17, backward = 17;
  EXPECT_EQ(tea_workspace_bound(&ragged, nullptr, &forward, &backward), TEA_INVALID);
  EXPECT_TRUE(says("run is NULL")) << tea_error();
  EXPECT_EQ(forward + backward, 34u) << "written although refused";
  tea_cost cost{};
  cost.visible = 17;
  EXPECT_EQ(tea_problem_cost(&ragged, nullptr, &cost), TEA_INVALID);
  EXPECT_EQ(cost.visible, 17u) << "written although refused";
  Prepared p(kRagged);
  p.call.tensor[TEA_CU_SEQLENS_KV] = nullptr;
  EXPECT_EQ(tea_problem_cost(&ragged, &p.call.run, &cost), TEA_INVALID);
  EXPECT_TRUE(says("cu_seqlens_kv is NULL")) << tea_error();
  EXPECT_EQ(tea_problem_cost(&ragged, &p.call.run, nullptr), TEA_INVALID);
  EXPECT_TRUE(says("cost is NULL")) << tea_error();
}

TEST(ApiRefusal, Text) {
  Problem p = Problem::parse(kDense), before = p;
  struct {
    const char *text, *fragment;
  } const rows[] = {{nullptr, "text is NULL"},
                    {"colour=red", "\"colour=red\""},
                    {"dtype", "\"dtype\""},
                    {"dtype=int8", "one of default, fp16"},
                    {"dtype=bf16 dtype=bf16", "each field once"},
                    {"batch=1e3", "an integer that fits"},
                    {"batch=", "an integer that fits"},
                    {"heads_q=99999999999", "an integer that fits"},
                    {"scale=fast", "a number"},
                    {"q=1,2", "3 values separated by commas"},
                    {"q=1,2,3,4", "3 values separated by commas"},
                    {"bias_stride=1,2,3", "4 values separated by commas"},
                    {"outputs=lse+weights", "\"outputs=lse+weights\""},
                    {"struct_size=472", "\"struct_size=472\""}};
  for (const auto& row : rows) {
    EXPECT_EQ(tea_problem_parse(row.text, &p), TEA_INVALID) << row.fragment;
    EXPECT_TRUE(says(row.fragment)) << tea_error() << "\n  wanted: " << row.fragment;
    EXPECT_TRUE(p == before) << "written although refused";
  }
  EXPECT_EQ(tea_problem_parse("", nullptr), TEA_INVALID);
  EXPECT_TRUE(says("problem is NULL")) << tea_error();
  for (const auto result :
       {tea_problem_print(nullptr, nullptr, 0, nullptr),
        tea_explain(nullptr, -1, nullptr, 0, nullptr), tea_problem_check(nullptr, nullptr)}) {
    EXPECT_EQ(result, TEA_INVALID);
    EXPECT_TRUE(says("problem is NULL")) << tea_error();
  }
  EXPECT_EQ(tea_cache_stats(nullptr), TEA_INVALID);
  EXPECT_TRUE(says("info is NULL")) << tea_error();
}

}  // namespace
}  // namespace tea
