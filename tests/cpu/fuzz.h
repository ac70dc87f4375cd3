// Random cases on one engine of the CPU against the oracle.
#pragma once
#include <gtest/gtest.h>

#include <string>

#include "kit/check.h"
#include "kit/draw.h"
#include "kit/share.h"

namespace tea::cpu {

inline void expect_agreement(const char* engine, uint64_t first, uint64_t count) {
  kit::say_share("random cases");
  uint64_t failed = 0;
  for (uint64_t seed = first; seed < first + count; seed += kit::kEvery) {
    const kit::Report report = kit::check(kit::draw(seed), engine);
    if (report.ok()) continue;
    if (++failed <= 5) ADD_FAILURE() << "seed " << seed << "\n" << report.text();
  }
  EXPECT_EQ(failed, 0u) << "of " << count;
}

// One set's draws. A processor without the instructions cannot run them: that is a skip, and says
// so.
inline void expect_set_agrees(const char* engine, bool available, uint64_t first) {
  if (!available) GTEST_SKIP() << engine << ": this processor lacks the instructions";
  expect_agreement(engine, first, 800);
}

}  // namespace tea::cpu
