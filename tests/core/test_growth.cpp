// as_known: the growth rule of the structs that callers hand over.
#include <gtest/gtest.h>

#include <cstddef>
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

// Memory that nobody has set claims any size: it must not be searched for zeros up to 4 GiB.
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

}  // namespace
}  // namespace tea
