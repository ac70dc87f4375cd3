// engines: the table of this build.
#include <gtest/gtest.h>

#include <set>

#include "core/registry.h"

namespace tea {
namespace {

TEST(Registry, NamesAreUniqueAndTheReferenceComesLast) {
  std::set<std::string_view> names;
  for (const Engine& e : engines()) EXPECT_TRUE(names.insert(e.name).second) << e.name;
  EXPECT_EQ(engines().back().name, "reference");
}

// The design promises that every valid problem has an engine.
TEST(Registry, TheReferenceAcceptsWhatNoOtherDoes) {
  const Problem p = Problem::parse(
      "dtype=fp64 batch=1 seqlen_q=3 seqlen_kv=5 heads_q=3 heads_kv=1 dim_qk=512 dim_v=8 "
      "training=1 "
      "bias=pre_scale alibi=slopes softmax=learnable softcap=3 dropout=0.5 window_left=2 "
      "window_right=3 bottom_right=1 lse_gradient=1 outputs=lse+max+sum_exp deterministic=1");
  p.check();
  EXPECT_TRUE(std::holds_alternative<std::unique_ptr<Executable>>(
      engines().back().attempt(p.normalised(), Device{})));
}

}  // namespace
}  // namespace tea
