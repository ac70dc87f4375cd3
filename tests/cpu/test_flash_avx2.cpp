// plan_avx2: the tiled kernels of this instruction set against the oracle, with every option.
#include "cpu/flash.h"
#include "cpu/fuzz.h"

namespace tea::cpu {
namespace {

TEST(FlashAvx2, RandomCasesAgreeWithTheOracle) {
  expect_set_agrees("cpu-avx2", kAvx2.available(), 200000);
}

TEST(FlashAvx2, RefusesDevices) {
  EXPECT_TRUE(std::holds_alternative<Refusal>(plan_avx2(Problem{}, Device{0, 90})));
}

}  // namespace
}  // namespace tea::cpu
