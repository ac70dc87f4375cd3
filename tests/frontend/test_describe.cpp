// From options and tensors to the line of a problem, without a framework.
#include <gtest/gtest.h>

#include <array>
#include <deque>
#include <stdexcept>

#include "frontend/describe.h"

namespace tea::frontend {
namespace {

// Tensors on the host that share one piece of memory; nothing reads it.
class Bench {
 public:
  Options options{};

  Bench(std::array<int64_t, 4> q, std::array<int64_t, 4> kv, const char* format) {
    options.q = contiguous({q.begin(), q.end()});
    options.k = options.v = contiguous({kv.begin(), kv.end()});
    options.format = format, options.mask = "none";
    options.window_left = options.window_right = -1;
    options.max_seqlen_q = options.max_seqlen_kv = -1;
  }

  Tensor contiguous(std::vector<int64_t> size, int32_t type = TEA_BF16) {
    std::vector<int64_t> stride(size.size());
    int64_t step = 1;
    for (size_t i = size.size(); i-- > 0; step *= size[i]) stride[i] = step;
    const std::vector<int64_t>& kept = kept_.emplace_back(std::move(size));
    const std::vector<int64_t>& strides = kept_.emplace_back(std::move(stride));
    return {memory_, type, -1, static_cast<int>(kept.size()), kept.data(), strides.data()};
  }

  // The problem's line, or the error.
  std::string line() {
    try {
      Description description(options);
      description.finish();
      char text[1024];
      if (tea_problem_print(&description.problem, text, sizeof text, nullptr)) return tea_error();
      return text;
    } catch (const std::runtime_error& e) {
      return e.what();
    }
  }

 private:
  alignas(16) char memory_[16]{};
  std::deque<std::vector<int64_t>> kept_;
};

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(Describe, FormatsBecomeStrides) {
  Bench bhsd({2, 4, 6, 16}, {2, 2, 8, 16}, "bhsd"), sbhd({6, 2, 4, 16}, {8, 2, 2, 16}, "sbhd");
  for (const std::string& line : {bhsd.line(), sbhd.line()}) {
    EXPECT_TRUE(contains(line, "heads_q=4 heads_kv=2 dim_qk=16 dim_v=16 batch=2")) << line;
    EXPECT_TRUE(contains(line, "seqlen_q=6 seqlen_kv=8")) << line;
  }
  EXPECT_TRUE(contains(bhsd.line(), " q=384,16,96")) << bhsd.line();
  EXPECT_TRUE(contains(sbhd.line(), " q=64,128,16")) << sbhd.line();
}

TEST(Describe, OptionsBecomeFields) {
  Bench t({2, 4, 6, 16}, {2, 4, 8, 16}, "bhsd");
  t.options.mask = "causal_bottom_right", t.options.window_left = 3, t.options.softcap = 20;
  t.options.sink = t.contiguous({4}, TEA_FP32);
  t.options.bias = t.contiguous({1, 4, 6, 8}, TEA_FP32);
  t.options.max_logit = true;
  const std::string line = t.line();
  for (const char* part : {"causal=1 bottom_right=1 window_left=4", "bias=post_scale",
                           "bias_dtype=fp32", "softmax=learnable", "softcap=20", "lse+max"})
    EXPECT_TRUE(contains(line, part)) << part << " in " << line;
}

TEST(Describe, RaggedSizesBelongToTheRun) {
  Bench t({1, 1, 1, 1}, {1, 1, 1, 1}, "thd");
  t.options.q = t.contiguous({12, 4, 16});
  t.options.k = t.options.v = t.contiguous({20, 4, 16});
  t.options.cu_seqlens_q = t.options.cu_seqlens_kv = t.contiguous({3}, kInt32);
  t.options.max_seqlen_q = 7;
  Description description(t.options);
  EXPECT_EQ(description.problem.q_form, TEA_RAGGED);
  EXPECT_EQ(description.problem.seqlen_q, 0);
  EXPECT_EQ(description.run.batch, 2);
  EXPECT_EQ(description.run.tokens_q, 12);
  EXPECT_EQ(description.run.max_q, 7);
  EXPECT_EQ(description.run.max_kv, 20);
}

TEST(Describe, ErrorsNameTheArgument) {
  Bench heads({2, 4, 6, 16}, {2, 4, 8, 16}, "bhsd");
  heads.options.sink = heads.contiguous({3}, TEA_FP32);
  EXPECT_EQ(heads.line(), "sink is of shape [3]; needs float32 [4]");
  Bench format({2, 4, 6, 16}, {2, 4, 8, 16}, "hbsd");
  EXPECT_TRUE(contains(format.line(), "format is \"hbsd\"; needs bhsd, bshd, sbhd or thd"));
  Bench dtype({2, 4, 6, 16}, {2, 4, 8, 16}, "bhsd");
  dtype.options.k.type = TEA_FP16;
  EXPECT_EQ(dtype.line(), "k.dtype is float16; needs bfloat16 as q");
}

}  // namespace
}  // namespace tea::frontend
