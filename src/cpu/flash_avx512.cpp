// The tiled kernels for AVX-512: 16 floats a vector, 24 accumulators of the 32 registers.
#include "cpu/flash_common.h"

#if defined(__x86_64__)
#include <immintrin.h>

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,prefer-vector-width=512")
#define TEA_MULTIPLY_EVEN(a, b) ((VQ)_mm512_maskz_mul_epu32(0xFF, (__m512i)(a), (__m512i)(b)))
#define TEA_WIDEN_FP16(from, to) \
  _mm256_storeu_ps(to, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(from))))
#define TEA_HALVES_TO_FLOATS(x) ((VF)_mm512_maskz_cvtph_ps(0xFFFF, (__m256i)(x)))
#define TEA_U16_TO_U32(x) ((VU)_mm512_maskz_cvtepu16_epi32(0xFFFF, (__m256i)(x)))
#define TEA_I8_TO_I16(x) ((VH)_mm256_cvtepi8_epi16((__m128i)(x)))
#define TEA_ROUND(x) ((VF)_mm512_maskz_roundscale_ps(0xFFFF, (__m512)(x), 8))
#define TEA_TIMES_POWER(x, n) ((VF)_mm512_maskz_scalef_ps(0xFFFF, (__m512)(x), (__m512)(n)))

namespace tea::cpu {
namespace {
constexpr int kBytes = 64, kTall = 6, kStrip = 4;
// Each of these needs the one before.
// clang-format off
#include "cpu/simd.h"
#include "cpu/tile.h"
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
