// What comes before the kernels of the matrix unit: the instructions they may use, from here to the
// includer's `#pragma GCC pop_options`, and the macros of simd.h, tile.h. Only for x86-64.
#pragma once

// GCC 12 misfires on the undefined operands of its own intrinsics: https://gcc.gnu.org/PR105593
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")
#pragma GCC target("amx-tile,amx-bf16,prefer-vector-width=512")
#define TEA_MULTIPLY_EVEN(a, b) ((VQ)_mm512_maskz_mul_epu32(0xFF, (__m512i)(a), (__m512i)(b)))
#define TEA_WIDEN_FP16(from, to) \
  _mm256_storeu_ps(to, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(from))))
#define TEA_ROUND(x) ((VF)_mm512_maskz_roundscale_ps(0xFFFF, (__m512)(x), 8))
#define TEA_TIMES_POWER(x, n) ((VF)_mm512_maskz_scalef_ps(0xFFFF, (__m512)(x), (__m512)(n)))
