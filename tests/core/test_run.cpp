// The check of a run: as_known, Checks, import_run.
#include <gtest/gtest.h>

#include <array>

#include "core/error.h"
#include "core/tensors.h"

namespace tea {
namespace {

struct Call {
  Problem p = Problem::parse(
      "dtype=fp32 batch=1 seqlen_q=1 seqlen_kv=1 heads_q=1 heads_kv=1 dim_qk=8 training=1");
  alignas(64) std::array<char, 256> memory{};
  std::array<void*, TEA_TENSOR_COUNT + 2> tensors{};
  tea_run run{};

  Call() {
    for (const tea_tensor t : {TEA_Q, TEA_K, TEA_V, TEA_O, TEA_LSE}) tensors[t] = memory.data();
    run.struct_size = sizeof run;
    run.tensors = tensors.data(), run.tensor_count = TEA_TENSOR_COUNT;
  }
  std::string error(Direction d = Direction::kForward) {
    try {
      import_run(p, Checks(p), &run, d, nullptr);
    } catch (const Error& e) {
      return e.what();
    }
    return "";
  }
};

TEST(ImportRun, AcceptsWhatIsComplete) {
  Call call;
  EXPECT_EQ(call.error(), "");
  call.tensors[TEA_DQ] = call.memory.data();  // of the other direction: may stay
  EXPECT_EQ(call.error(), "");
}

TEST(ImportRun, NamesTheTensor) {
  Call missing;
  missing.tensors[TEA_V] = nullptr;
  EXPECT_EQ(missing.error(), "tensor V is NULL; needs memory for its elements");
  Call extra;
  extra.tensors[TEA_BIAS] = extra.memory.data();
  EXPECT_EQ(extra.error(), "tensor bias is a pointer; needs NULL: this problem does not use it");
  Call odd;
  odd.tensors[TEA_K] = odd.memory.data() + 8;
  EXPECT_NE(odd.error().find("tensor K is not aligned; needs an address that is a multiple of 16"),
            std::string::npos);
  odd.p.alignment = 8;
  EXPECT_EQ(odd.error(), "");
  Call backward;
  EXPECT_EQ(backward.error(Direction::kBackward),
            "tensor dO is NULL; needs memory for its elements");
}

TEST(ImportRun, ShorterArraysAndStructsAreExtended) {
  Call call;
  call.run.tensor_count = TEA_LSE + 1;
  call.tensors[TEA_SINK] = call.memory.data();  // beyond the count: not read
  EXPECT_EQ(call.error(), "");
  call.run.struct_size = offsetof(tea_run, origin);
  call.run.origin[0] = -5;  // beyond the struct this caller knows
  EXPECT_EQ(call.error(), "");
  EXPECT_EQ(as_known(&call.run).origin[0], 0);
}

TEST(ImportRun, UnknownTensorsMustBeNull) {
  Call call;
  call.run.tensor_count = TEA_TENSOR_COUNT + 2;
  EXPECT_EQ(call.error(), "");
  call.tensors[TEA_TENSOR_COUNT + 1] = call.memory.data();
  EXPECT_EQ(call.error(),
            "run.tensors[44] is a pointer; needs NULL: this library knows 43 tensors");
}

// The quick answer for all tensors must be what the table says of each.
TEST(Checks, PassOnlyWhatTheTableAccepts) {
  for (const char* options : {"", " training=1", " training=1 bias=post_scale softmax=learnable",
                              " alignment=64", " outputs=lse+max"}) {
    Call call;
    call.p =
        Problem::parse("dtype=fp32 batch=1 seqlen_q=1 seqlen_kv=1 heads_q=1 heads_kv=1 dim_qk=8" +
                       std::string(options));
    for (const Direction d : {Direction::kForward, Direction::kBackward})
      for (const TensorInfo& info : tensor_table())
        for (const size_t offset : {size_t{0}, size_t{1}, size_t{16}, size_t{256}}) {
          void* tensors[TEA_TENSOR_COUNT] = {};
          for (const TensorInfo& other : tensor_table())
            if (other.use(call.p, d) == Use::kRequired) tensors[other.index] = call.memory.data();
          // dsink requires the sink, in addition to the rules of the table.
          if (call.p.softmax == TEA_SOFTMAX_LEARNABLE) tensors[TEA_SINK] = call.memory.data();
          ASSERT_TRUE(Checks(call.p).pass(tensors, d));
          // 256 stands for NULL.
          tensors[info.index] = offset == 256 ? nullptr : call.memory.data() + offset;
          std::copy(std::begin(tensors), std::end(tensors), call.tensors.begin());
          const std::string error = call.error(d);
          EXPECT_EQ(Checks(call.p).pass(tensors, d), error.empty())
              << info.name << " " << offset << options << ": " << error;
        }
  }
}

// A run that gives a size which the problem has is refused, though it is not needed.
TEST(ImportRun, RefusesSizesOfADenseProblem) {
  Call call;
  call.run.max_q = 1;
  EXPECT_EQ(call.error(), "run.max_q is 1; needs 0: the problem itself gives this size");
}

TEST(ImportRun, AContextNeedsItsFunction) {
  Call call;
  call.run.parallel_context = &call;
  EXPECT_EQ(call.error(), "run.parallel_context is a pointer; needs NULL without run.parallel_for");
}

TEST(ImportRun, ChecksTheWorkspace) {
  Call call;
  const auto kilobyte = [](const Problem&, const Geometry&, Direction) { return uint64_t{1024}; };
  const auto error = [&] {
    try {
      import_run(call.p, Checks(call.p), &call.run, Direction::kForward, kilobyte);
    } catch (const Error& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  EXPECT_EQ(error(), "run.workspace_bytes is 0; needs at least 1024");
  call.run.workspace_bytes = 1024;
  EXPECT_EQ(error(), "run.workspace is NULL; needs memory aligned to 256 bytes");
}

TEST(ImportRun, EmptyTensorsNeedNoMemory) {
  Call call;
  call.p.batch = 0;
  call.tensors = {};
  EXPECT_EQ(call.error(), "");
}

}  // namespace
}  // namespace tea
