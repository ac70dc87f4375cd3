// AVX-512 instructions for the primitives of simd.h, tile.h and decode_kernel.h.
#pragma once

#define TEA_MULTIPLY_EVEN(a, b) ((VQ)_mm512_maskz_mul_epu32(0xFF, (__m512i)(a), (__m512i)(b)))
#define TEA_WIDEN_FP16(from, to) \
  _mm256_storeu_ps(to, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(from))))
#define TEA_HALVES_TO_FLOATS(x) ((VF)_mm512_maskz_cvtph_ps(0xFFFF, (__m256i)(x)))
#define TEA_U16_TO_U32(x) ((VU)_mm512_maskz_cvtepu16_epi32(0xFFFF, (__m256i)(x)))
#define TEA_I8_TO_I16(x) ((VH)_mm256_cvtepi8_epi16((__m128i)(x)))
#define TEA_ROUND(x) ((VF)_mm512_maskz_roundscale_ps(0xFFFF, (__m512)(x), 8))
#define TEA_TIMES_POWER(x, n) ((VF)_mm512_maskz_scalef_ps(0xFFFF, (__m512)(x), (__m512)(n)))
