// Vector code that runs concurrently with AMX: exponentials, and rounding to operands. Included
// by flash_amx.cpp after tile.h, inside its namespace.
#pragma once

// Always inlined, so that state between pieces of work stays in registers.
#define TEA_INLINE inline __attribute__((always_inline))

constexpr float kLog2e = 1.44269504f;

// 2^x with a relative error of a few units in the last place: a polynomial in x - floor(x).
TEA_PRIMITIVE VF power_of_two(VF x) {
  const VF r = (VF)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  VF p = 1.8775766831e-3f * r + 8.9893401418e-3f;
  p = p * r + 5.5826317935e-2f;
  p = p * r + 2.4015361712e-1f;
  p = p * r + 6.9315307318e-1f;
  p = p * r + 9.9999992506e-1f;
  return (VF)_mm512_scalef_ps((__m512)p, (__m512)x);
}

// A score times the scale, never part of a multiply-add: both passes form the same logit, so that
// of the largest one nothing is left when a maximum or LSE that came from it is subtracted.
TEA_PRIMITIVE VF logit_of(VF score, VF scale) {
  return (VF)_mm512_maskz_mul_ps(0xFFFF, (__m512)score, (__m512)scale);
}

// Two vectors of numbers that are not negative as bf16, element by element. Ties round up.
TEA_PRIMITIVE __m512i as_pairs_up(VF low, VF high) {
  const __m512i half = _mm512_set1_epi32(0x8000);
  const __m512i a = _mm512_add_epi32((__m512i)low, half);
  const __m512i b = _mm512_add_epi32((__m512i)high, half);
  return _mm512_mask_blend_epi16(0xAAAAAAAA, _mm512_srli_epi32(a, 16), b);
}

// Two vectors as bf16, element by element.
TEA_PRIMITIVE __m512i as_pairs(VF low, VF high) {
  const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
  alignas(64) static constexpr uint16_t kOrder[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                      21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                      11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return _mm512_permutexvar_epi16(_mm512_load_si512(kOrder), both);
}

// Two vectors as bf16, one after the other.
TEA_PRIMITIVE __m512i joined(VF low, VF high) {
  return (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
}

// Two vectors of bf16 numbers, element by element.
TEA_PRIMITIVE __m512i exact_pairs(VF low, VF high) {
  return _mm512_or_si512(_mm512_srli_epi32((__m512i)low, 16), (__m512i)high);
}

// A vector as the sum of T vectors, the largest first. One stays as it is; three are bf16 numbers,
// each the rest of those before rounded to nearest, and exactly x together, unless a bit of x is
// below the smallest normal number.
template <int T>
struct Terms {
  TEA_INLINE explicit Terms(VF x) {
    for (int t = 0; t + 1 < T; ++t) x -= term[t] = rounded(x);
    term[T - 1] = x;
  }
  VF term[T];

 private:
  static TEA_INLINE VF rounded(VF x) {
    const __m512i up = _mm512_add_epi32((__m512i)x, _mm512_set1_epi32(0x8000));
    return (VF)_mm512_and_si512(up, _mm512_set1_epi32(-0x10000));
  }
};

// As operands: pairs element by element, or one vector after the other.
template <int T>
TEA_PRIMITIVE __m512i pairs_of(const Terms<T>& low, const Terms<T>& high, int t) {
  return T == 1 ? as_pairs(low.term[t], high.term[t]) : exact_pairs(low.term[t], high.term[t]);
}
