// as_known: the growth rule of the structs that callers hand over.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <functional>
#include <vector>

#include "core/growth.h"
#include "core/tensors.h"
#include "te_attention_ops.h"

namespace tea {
namespace {

constexpr Growing kNames{"args", "tea_cp_valid", "a tea_cp_valid"};

std::string error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& e) {
    EXPECT_EQ(e.status, TEA_INVALID);
    return e.what();
  }
  return "";
}

// A caller that knows one field more than this library.
struct Newer {
  tea_cp_valid known;
  int64_t later;
};

TEST(Growth, ShorterStructsAreExtendedWithZeros) {
  tea_cp_valid caller{};
  caller.struct_size = offsetof(tea_cp_valid, batch);
  caller.batch = 99;  // beyond what the caller says it has
  caller.input = &caller;
  const tea_cp_valid known = as_known(&caller, kNames);
  EXPECT_EQ(known.batch, 0);
  EXPECT_EQ(known.input, &caller);
}

TEST(Growth, LongerStructsMustEndInZeros) {
  Newer caller{};
  caller.known.struct_size = sizeof caller;
  caller.known.batch = 3;
  EXPECT_EQ(as_known(&caller.known, kNames).batch, 3);
  caller.later = 1;
  EXPECT_EQ(error_of([&] { as_known(&caller.known, kNames); }),
            "struct_size is " + shown(sizeof caller) + "; needs at most " +
                shown(sizeof(tea_cp_valid)) + ", or zeros beyond: a newer field is set");
}

// Uninitialised memory may have any size: it must not be searched for zeros up to 4 GiB.
TEST(Growth, NoStructIsSoLarge) {
  std::vector<char> memory(8192);
  auto* const caller = new (memory.data()) tea_cp_valid{};
  caller->struct_size = 4096;
  EXPECT_EQ(error_of([&] { as_known(caller, kNames); }), "");
  for (const uint32_t size : {4097u, 0xfffffff0u}) {
    caller->struct_size = size;
    EXPECT_EQ(error_of([&] { as_known(caller, kNames); }),
              "struct_size is " + shown(size) + "; needs sizeof(tea_cp_valid), at most 4096");
  }
}

TEST(Growth, NoStructOrNoSize) {
  EXPECT_EQ(error_of([] { as_known<tea_cp_valid>(nullptr, kNames); }),
            "args is NULL; needs a tea_cp_valid");
  tea_cp_valid caller{};
  EXPECT_EQ(error_of([&] { as_known(&caller, kNames); }),
            "struct_size is 0; needs sizeof(tea_cp_valid)");
  caller.struct_size = 8;
  EXPECT_EQ(error_of([&] {
              as_known(&caller, {"x", "tea_y", "a tea_y", "x.size", 12});
            }),
            "x.size is 8; needs sizeof(tea_y)");
}

// A caller of the first version of tea_run, which had no threads to lend.
TEST(Growth, ARunMayLackWhatCameLater) {
  static_assert(offsetof(tea_run, parallel_for) == 144);
  tea_run caller{};
  caller.struct_size = 144;
  caller.max_q = 7;
  caller.parallel_context = &caller;
  const tea_run known = as_known(&caller);
  EXPECT_EQ(known.max_q, 7);
  EXPECT_EQ(known.parallel_context, nullptr);
  caller.struct_size = offsetof(tea_run, workspace) - 1;
  EXPECT_EQ(
      error_of([&] { as_known(&caller); }),
      "run.struct_size is " + shown(offsetof(tea_run, workspace) - 1) + "; needs sizeof(tea_run)");
}

// A caller that was built with half of what this library knows, and one that was built with more:
// what lies behind their structs stays as it was.
template <class Struct>
struct Caller {
  std::vector<char> memory;
  size_t size;
  explicit Caller(size_t bytes) : memory(bytes + 64, '\x5a'), size(bytes) {
    set_size(static_cast<uint32_t>(bytes));
  }
  void set_size(uint32_t bytes) { std::memcpy(memory.data(), &bytes, sizeof bytes); }
  uint32_t struct_size() const {
    uint32_t bytes;
    std::memcpy(&bytes, memory.data(), sizeof bytes);
    return bytes;
  }
  Struct* get() { return reinterpret_cast<Struct*>(memory.data()); }
  // Whether the bytes [begin, end) are all `value`.
  bool holds(size_t begin, size_t end, char value) const {
    return std::all_of(memory.begin() + static_cast<std::ptrdiff_t>(begin),
                       memory.begin() + static_cast<std::ptrdiff_t>(end),
                       [&](char c) { return c == value; });
  }
  bool untouched_behind() const { return holds(size, memory.size(), '\x5a'); }
};

constexpr const char* kSmall = "dtype=fp32 heads_q=2 heads_kv=1 dim_qk=8 batch=1 seqlen_q=4";

TEST(Growth, ResultsEndWhereTheCallersStructEnds) {
  constexpr size_t kDims = offsetof(tea_problem, causal);
  Caller<tea_problem> shorter(kDims);
  ASSERT_EQ(tea_problem_parse(kSmall, shorter.get()), TEA_OK) << tea_error();
  EXPECT_TRUE(shorter.untouched_behind());
  EXPECT_EQ(shorter.struct_size(), kDims);
  EXPECT_EQ(shorter.get()->dim_qk, 8);
  Caller<tea_problem> normalised(kDims);
  ASSERT_EQ(tea_problem_check(shorter.get(), normalised.get()), TEA_OK) << tea_error();
  EXPECT_TRUE(normalised.untouched_behind());
  EXPECT_EQ(normalised.get()->heads_q, 2);

  Caller<tea_cost> cost(offsetof(tea_cost, backward_flops));
  ASSERT_EQ(tea_problem_cost(shorter.get(), nullptr, cost.get()), TEA_OK) << tea_error();
  EXPECT_TRUE(cost.untouched_behind());
  EXPECT_EQ(cost.get()->visible, 0u);  // no keys
  EXPECT_GT(cost.get()->forward_bytes, 0u);
  Caller<tea_cache_info> info(offsetof(tea_cache_info, entries));
  ASSERT_EQ(tea_cache_stats(info.get()), TEA_OK) << tea_error();
  EXPECT_TRUE(info.untouched_behind());
}

TEST(Growth, ResultsAreFollowedByZerosInALongerStruct) {
  Caller<tea_problem> longer(sizeof(tea_problem) + 16);
  ASSERT_EQ(tea_problem_parse(kSmall, longer.get()), TEA_OK) << tea_error();
  EXPECT_EQ(longer.struct_size(), sizeof(tea_problem) + 16);
  EXPECT_TRUE(longer.holds(sizeof(tea_problem), sizeof(tea_problem) + 16, '\0'));
  EXPECT_TRUE(longer.untouched_behind());
  EXPECT_EQ(tea_problem_check(longer.get(), longer.get()), TEA_OK) << tea_error();
}

TEST(Growth, AResultWithoutASizeHasThatOfTheFirstVersion) {
  Caller<tea_problem> caller(472);
  caller.set_size(0);
  ASSERT_EQ(tea_problem_parse(kSmall, caller.get()), TEA_OK) << tea_error();
  EXPECT_EQ(caller.struct_size(), 472u);
  EXPECT_TRUE(caller.untouched_behind());
  Caller<tea_cost> cost(48);
  cost.set_size(0);
  EXPECT_EQ(tea_problem_cost(caller.get(), nullptr, cost.get()), TEA_OK) << tea_error();
  EXPECT_TRUE(cost.untouched_behind());
  Caller<tea_cache_info> info(40);
  info.set_size(0);
  EXPECT_EQ(tea_cache_stats(info.get()), TEA_OK) << tea_error();
  EXPECT_TRUE(info.untouched_behind());
}

TEST(Growth, NoFieldOfAResultIsLost) {
  Caller<tea_problem> caller(offsetof(tea_problem, causal));
  const std::vector<char> before = caller.memory;
  EXPECT_EQ(tea_problem_parse((std::string(kSmall) + " causal=1").c_str(), caller.get()),
            TEA_INVALID);
  EXPECT_EQ(std::string(tea_error()), "struct_size is " + shown(offsetof(tea_problem, causal)) +
                                          "; needs at least " + shown(sizeof(tea_problem)) +
                                          ": a newer field is set");
  EXPECT_EQ(caller.memory, before);
  for (const uint32_t size : {3u, 4097u}) {
    caller.set_size(size);
    EXPECT_EQ(tea_problem_parse(kSmall, caller.get()), TEA_INVALID);
    EXPECT_EQ(std::string(tea_error()),
              "struct_size is " + shown(size) + "; needs sizeof(tea_problem), or 0: 472");
  }
}

}  // namespace
}  // namespace tea
