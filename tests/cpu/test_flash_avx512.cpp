// plan_avx512: the tiled kernels of this instruction set against the oracle, with every option.
#include "cpu/flash.h"
#include "cpu/fuzz.h"

namespace tea::cpu {
namespace {

TEST(FlashAvx512, RandomCasesAgreeWithTheOracle) {
  expect_set_agrees("cpu-avx512", kAvx512.available(), 100000);
}

TEST(FlashAvx512, RefusesDevices) {
  EXPECT_TRUE(std::holds_alternative<Refusal>(plan_avx512(Problem{}, Device{0, 90})));
}

}  // namespace
}  // namespace tea::cpu
