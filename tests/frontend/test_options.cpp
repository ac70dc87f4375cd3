// The table of options: what front ends derive from it.
#include <gtest/gtest.h>

#include "frontend/options.h"

namespace tea::frontend {
namespace {

TEST(Options, SchemaNamesTypesAndDefaultsInOrder) {
  EXPECT_EQ(schema().find("Tensor q, Tensor k, Tensor v, str format=\"bhsd\", str mask=\"none\", "
                          "bool training=False, float? scale=None, SymInt window_left=-1"),
            0u);
  EXPECT_NE(schema().find(", Tensor? bias=None, Tensor? sink=None, "), std::string::npos);
}

TEST(Options, ViewsReplaceTensorsAndKeepEverythingElse) {
  OptionsOf<int> framework{};  // a framework whose tensors are numbers
  framework.q = 5, framework.bias = 7, framework.mask = "causal", framework.window_left = 3;
  std::string seen;
  const Options options = with_views(framework, [&](const char* name, int tensor) {
    seen += std::string(name) + "=" + std::to_string(tensor) + " ";
    Tensor view;
    view.rank = tensor;
    return view;
  });
  EXPECT_EQ(seen, "q=5 k=0 v=0 bias=7 ");
  EXPECT_EQ(options.q.rank, 5);
  EXPECT_EQ(options.bias->rank, 7);
  EXPECT_FALSE(options.sink);
  EXPECT_EQ(options.mask, "causal");
  EXPECT_EQ(options.window_left, 3);
}

}  // namespace
}  // namespace tea::frontend
