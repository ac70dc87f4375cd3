// The tiled kernels for AVX2 with FMA: 8 floats a vector, 12 accumulators of the 16 registers.
#include "cpu/flash_common.h"

#if defined(__x86_64__)
#include <immintrin.h>

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#define TEA_MULTIPLY_EVEN(a, b) ((VQ)_mm256_mul_epu32((__m256i)(a), (__m256i)(b)))
#define TEA_WIDEN_FP16(from, to) \
  _mm256_storeu_ps(to, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(from))))
#define TEA_HALVES_TO_FLOATS(x) ((VF)_mm256_cvtph_ps((__m128i)(x)))
#define TEA_U16_TO_U32(x) ((VU)_mm256_cvtepu16_epi32((__m128i)(x)))
#define TEA_I8_TO_I16(x) ((VH)_mm_cvtepi8_epi16(_mm_set1_epi64((__m64)(x))))

namespace tea::cpu {
namespace {
constexpr int kBytes = 32, kTall = 6, kStrip = 2;
#include "cpu/vector_kernels.h"
}  // namespace
}  // namespace tea::cpu
#pragma GCC pop_options

namespace tea::cpu {
namespace {
bool available() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
}
}  // namespace
const InstructionSet kAvx2{"cpu-avx2", available, &kKernels<float>, &kKernels<double>};
}  // namespace tea::cpu
#endif

namespace tea::cpu {
Attempt plan_avx2(const Problem& p, const Device& d) { return plan_with(kAvx2, p, d); }
}  // namespace tea::cpu
