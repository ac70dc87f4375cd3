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
#include "cpu/vector_kernels.h"
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
#endif

namespace tea::cpu {
Attempt plan_avx512(const Problem& p, const Device& d) { return plan_with(kAvx512, p, d); }
}  // namespace tea::cpu
