// The shared checks: growth rules, sizes, dtypes, strides and places.
#include "buffer.h"
#include "ops/args.h"

namespace tea {
namespace {

// A caller that knows one field more than this library.
struct Newer {
  tea_cp_valid known;
  int64_t later;
};

TEST(Args, ShorterStructsAreExtendedWithZeros) {
  tea_cp_valid caller{};
  caller.struct_size = offsetof(tea_cp_valid, batch);
  caller.batch = 99;  // beyond what the caller says it has
  caller.input = &caller;
  const tea_cp_valid args = imported(&caller, "tea_cp_valid");
  EXPECT_EQ(args.batch, 0);
  EXPECT_EQ(args.input, &caller);
}

TEST(Args, LongerStructsMustEndInZeros) {
  Newer caller{};
  caller.known.struct_size = sizeof caller;
  caller.known.batch = 3;
  EXPECT_EQ(imported(&caller.known, "tea_cp_valid").batch, 3);
  caller.later = 1;
  EXPECT_EQ(error_of([&] { imported(&caller.known, "tea_cp_valid"); }),
            "struct_size is " + shown(sizeof caller) + "; needs at most " +
                shown(sizeof(tea_cp_valid)) + ", or zeros beyond: a newer field is set");
}

TEST(Args, NoStructOrNoSize) {
  EXPECT_EQ(error_of([] { imported<tea_cp_valid>(nullptr, "tea_cp_valid"); }),
            "args is NULL; needs tea_cp_valid");
  tea_cp_valid caller{};
  EXPECT_EQ(error_of([&] { imported(&caller, "tea_cp_valid"); }),
            "struct_size is 0; needs sizeof(tea_cp_valid)");
}

TEST(Args, SizesMultiplyWithoutOverflow) {
  EXPECT_EQ(require_sizes({{"a", 3}, {"b", 5}}), 15);
  EXPECT_EQ(require_sizes({{"a", 3}, {"b", 0}}), 0);
  EXPECT_EQ(error_of([] { require_sizes({{"a", 3}, {"b", -5}}); }), "b is -5; needs 0 or more");
  const int64_t big = int64_t{1} << 40;
  EXPECT_EQ(error_of([=] {
              require_sizes({{"a", big}, {"b", big}});
            }),
            "b is 1099511627776; needs a tensor of at most 2^56 elements");
}

TEST(Args, PlacesThatThisBuildAndMachineHave) {
  EXPECT_TRUE(is_host({}));
  EXPECT_EQ(error_of([] {
              is_host({-2, nullptr});
            }),
            "device is -2; needs -1 for the host, or the index of a GPU");
  const std::string error = error_of([] { is_host({1 << 20, nullptr}); });
  EXPECT_NE(error.find("device is 1048576; needs -1, the host"), std::string::npos);
  EXPECT_EQ(error.find("TE_ATTENTION_CUDA=OFF") != std::string::npos, !kGpuCode);
}

TEST(Args, DtypesFlagsAndReserved) {
  require_dtype("dtype", TEA_E5M2, kFp8Dtypes);
  EXPECT_EQ(error_of([] { require_dtype("dtype", TEA_FP64, kFp8Dtypes); }),
            "dtype is fp64; needs one of e4m3, e5m2");
  EXPECT_EQ(error_of([] { require_dtype("dtype", -1, kFp8Dtypes); }),
            "dtype is -1; needs one of e4m3, e5m2");
  EXPECT_EQ(error_of([] { require_flag("packed", -1); }), "packed is -1; needs 0 or 1");
  EXPECT_EQ(error_of([] { require_reserved("reserved", 5); }), "reserved is 5; needs 0");
  EXPECT_EQ(error_of([] { require_pointers({{"x", nullptr}}); }), "x is NULL; needs memory");
}

TEST(Args, StridesDefaultToContiguous) {
  const tea_strides s = strides_or_contiguous("s", {}, 7, 3, 2);
  EXPECT_EQ(s.batch, 42);
  EXPECT_EQ(s.seq, 6);
  EXPECT_EQ(s.head, 2);
  EXPECT_EQ(strides_or_contiguous("s", {0, 9, 1}, 7, 3, 2).seq, 9);
}

}  // namespace
}  // namespace tea
