// The GPU's oracle against the one of the host: the same numbers and the same bounds on random
// cases.
#include <gtest/gtest.h>

#include <cmath>
#include <mutex>

#include "gpu/parallel.h"
#include "kit/bounds.h"
#include "kit/check.h"
#include "kit/draw.h"
#include "kit/oracle_gpu.h"

namespace tea::kit {
namespace {

bool close(double a, double b, double relative, double absolute) {
  if (a == b || (std::isnan(a) && std::isnan(b))) return true;
  return std::abs(a - b) <= relative * std::max(std::abs(a), std::abs(b)) + absolute;
}

// Sums in another order differ by far less than what an engine may be off.
void expect_alike(const char* name, const oracle::Tensor& gpu, const oracle::Tensor& host) {
  ASSERT_EQ(gpu.value.size(), host.value.size()) << name;
  for (size_t i = 0; i < host.value.size(); ++i) {
    ASSERT_TRUE(close(gpu.value[i], host.value[i], 1e-11, 1e-4 * host.bound[i]))
        << name << "[" << i << "] is " << gpu.value[i] << ", on the host " << host.value[i]
        << " with bound " << host.bound[i];
    ASSERT_TRUE(close(gpu.bound[i], host.bound[i], 1e-4, 1e-300))
        << name << "[" << i << "] has bound " << gpu.bound[i] << ", on the host " << host.bound[i]
        << " at " << host.value[i];
  }
}

void expect_alike(const oracle::Case& c, const oracle::Precision& p) {
  const oracle::Result gpu = oracle::solve_on_gpu(c, p), host = oracle::solve(c, p);
  expect_alike("O", gpu.o, host.o);
  expect_alike("LSE", gpu.lse, host.lse);
  expect_alike("MAX", gpu.max, host.max);
  expect_alike("SUM_EXP", gpu.sum_exp, host.sum_exp);
  if (c.dout.empty()) return;
  expect_alike("dQ", gpu.dq, host.dq);
  expect_alike("dK", gpu.dk, host.dk);
  expect_alike("dV", gpu.dv, host.dv);
  if (!c.sink.empty() && host.dsink.value.size()) expect_alike("dsink", gpu.dsink, host.dsink);
}

TEST(OracleOfTheGpu, AgreesWithTheHosts) {
  constexpr uint64_t kFirst = 7'000'000, kCount = 3000;
  std::atomic<int> compared{0};
  parallel_for(kCount, [&](size_t i) {
    const Case drawn = draw(kFirst + i);
    const Inputs inputs(drawn);
    const Problem& p = inputs.problem();
    if (p.is_fp8() || p.kv_dtype || p.bias || p.dtype == TEA_FP64) return;
    if (testing::Test::HasFatalFailure()) return;
    SCOPED_TRACE(drawn.text());
    oracle::Case c = inputs.logical();
    const oracle::Precision precision = precision_of("portable", p);
    expect_alike(c, precision);
    c.o_stored = oracle::solve(c, precision).o.value;
    expect_alike(c, precision);
    ++compared;
  });
  std::printf("  %d cases compared\n", compared.load());
  EXPECT_GT(compared, 500);
}

TEST(OracleOfTheGpu, RefusesWhatItDoesNotKnow) {
  const Case biased = Case::parse(
      "dtype=fp16 bias=post_scale heads_q=1 heads_kv=1 dim_qk=8 batch=1 seqlen_q=2 seqlen_kv=2");
  EXPECT_THROW(oracle::solve_on_gpu(Inputs(biased).logical(), {}), std::runtime_error);
}

}  // namespace
}  // namespace tea::kit
