// plan_generic: the tiled kernels of this instruction set against the oracle, with every option.
#include "cpu/flash.h"
#include "cpu/fuzz.h"

namespace tea::cpu {
namespace {

TEST(FlashGeneric, RandomCasesAgreeWithTheOracle) {
  expect_set_agrees("cpu-generic", kGeneric.available(), 300000);
}

TEST(FlashGeneric, RefusesDevices) {
  EXPECT_TRUE(std::holds_alternative<Refusal>(plan_generic(Problem{}, Device{0, 90})));
}

}  // namespace
}  // namespace tea::cpu
