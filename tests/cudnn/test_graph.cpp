// Graphs need a GPU, where tests/gpu runs them; here: a refusal instead of a crash without one.
#include <gtest/gtest.h>

#include "cudnn/graph.h"

namespace tea::cudnn {
namespace {

TEST(CudnnGraph, IsRefusedWhereThereIsNoLibraryOrNoSuchDevice) {
  const Problem p =
      Problem::parse("dtype=bf16 heads_q=2 heads_kv=2 dim_qk=64 batch=1 seqlen_q=64 seqlen_kv=64");
  const GraphKey key{example_of(p), Direction::kForward, false, false};
  const auto made = build(p, default_geometry(p), key, {4096, 90, 132, 227 * 1024});
  const auto* refusal = std::get_if<Refusal>(&made);
  ASSERT_TRUE(refusal);
  EXPECT_EQ(refusal->why.find("cuDNN"), 0u) << refusal->why;
}

}  // namespace
}  // namespace tea::cudnn
