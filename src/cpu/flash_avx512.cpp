// The tiled kernels for AVX-512: 16 floats a vector, 24 accumulators of the 32 registers.
#include "cpu/flash_common.h"

#if defined(__x86_64__)
#include <immintrin.h>

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,prefer-vector-width=512")
#include "cpu/avx512_primitives.h"

namespace tea::cpu {
namespace {
constexpr int kBytes = 64, kTall = 6, kStrip = 4;
// Each of these needs the one before.
// clang-format off
#include "cpu/simd.h"
#include "cpu/tile.h"
#include "cpu/row_sums.h"
#include "cpu/flash_kernel.h"
#include "cpu/decode_kernel.h"
// clang-format on
}  // namespace
}  // namespace tea::cpu
#pragma GCC pop_options

namespace tea::cpu {
namespace {
bool available() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
}  // namespace
const InstructionSet kAvx512{"cpu-avx512", available, &kKernels<float>, &kKernels<double>};
}  // namespace tea::cpu
#else
namespace tea::cpu {
const InstructionSet kAvx512{"cpu-avx512", [] { return false; }, nullptr, nullptr};
}
#endif

namespace tea::cpu {
Attempt plan_avx512(const Problem& p, const Device& d) { return plan_with(kAvx512, p, d); }
}  // namespace tea::cpu
