// The shared checks: sizes, dtypes, strides and places.
#include "buffer.h"
#include "ops/args.h"

namespace tea {
namespace {

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
}

TEST(Args, PointersAreThereAndAlignedToTheirElements) {
  alignas(8) const char memory[8] = {};
  const auto* odd = reinterpret_cast<const float*>(memory + 2);
  const float* none = nullptr;
  EXPECT_EQ(error_of([=] { require_pointers({{"x", none}}); }), "x is NULL; needs memory");
  EXPECT_EQ(error_of([=] {
              require_pointers({{"lse", odd}});
            }),
            "lse is not aligned; needs an address that is a multiple of 4");
  require_pointers({{"half", odd, 2}});
  EXPECT_EQ(error_of([=] {
              require_pointers({{"o", odd, 8}});
            }),
            "o is not aligned; needs an address that is a multiple of 8");
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
