// Fills of bytes and of elements of every dtype.
#include <cmath>
#include <limits>

#include "buffer.h"
#include "ops/fill.h"

namespace tea {
namespace {

TEST(Fill, RepeatsTheLowByte) {
  for (size_t bytes : {0, 1, 7, 4099}) {
    Buffer buffer(TEA_E4M3, 4099);
    fill_bytes(buffer.data(), 0x1234, bytes, {});
    for (size_t i = 0; i < 4099; ++i)
      ASSERT_EQ(static_cast<uint8_t*>(buffer.data())[i], i < bytes ? 0x34 : 0xFF);
  }
  fill_bytes(nullptr, 0, 0, {});
  EXPECT_EQ(error_of([] { fill_bytes(nullptr, 0, 1, {}); }), "data is NULL; needs memory");
}

TEST(Fill, RoundsToTheDtype) {
  for (int32_t dtype : kEveryDtype) {
    Buffer buffer(dtype, 9);
    fill_elements({buffer.data(), dtype, 8}, -0.1, {});
    for (int64_t i = 0; i < 8; ++i) {
      EXPECT_NEAR(buffer[i], -0.1, 0.1 * rounding_unit(dtype)) << dtype_name(dtype);
      EXPECT_LT(buffer[i], 0);
    }
    EXPECT_TRUE(buffer.untouched(8));
  }
}

TEST(Fill, MinusInfinityForLse) {
  Buffer lse(TEA_FP32, 5);
  fill_elements({lse.data(), TEA_FP32, 5}, -std::numeric_limits<double>::infinity(), {});
  for (int64_t i = 0; i < 5; ++i) EXPECT_TRUE(std::isinf(lse[i]) && lse[i] < 0);
}

TEST(Fill, NamesWhatIsWrong) {
  float x = 0;
  EXPECT_EQ(error_of([&] {
              fill_elements({&x, 7, 1}, 0, {});
            }),
            "dtype is 7; needs one of fp16, bf16, fp32, fp64, e4m3, e5m2");
  EXPECT_EQ(error_of([&] {
              fill_elements({&x, TEA_FP32, -1}, 0, {});
            }),
            "count is -1; needs 0 or more");
  EXPECT_EQ(error_of([&] {
              fill_elements({nullptr, TEA_FP32, 1}, 0, {});
            }),
            "data is NULL; needs memory");
}

}  // namespace
}  // namespace tea
