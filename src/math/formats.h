// The small float formats as bits: E4M3 and E5M2 (Micikevicius et al., 2022), bfloat16 and half.
// Casts round to nearest even; casts to fp8 saturate to the largest finite value, NaN stays NaN.
#pragma once
#include <cstdint>
#include <cstring>

#include "math/host_device.h"

namespace tea {

TEA_HOST_DEVICE uint32_t float_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}
TEA_HOST_DEVICE float bits_float(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

struct Fp8Format {
  int exponent_bits, mantissa_bits;
  bool has_infinity;  // E5M2 keeps the IEEE specials; E4M3 has only one NaN per sign
  float largest;
};
inline constexpr Fp8Format kE4M3{4, 3, false, 448.0f};
inline constexpr Fp8Format kE5M2{5, 2, true, 57344.0f};

// Whether probabilities, whose largest is 1 times `keep_factor` of dropout, exceed the format after
// scaling. The slack is for the rounding of a scale that was computed to fit.
TEA_HOST_DEVICE bool saturates(float s_scale, float keep_factor, float largest) {
  return s_scale * keep_factor > largest * 1.000001f;
}

TEA_HOST_DEVICE float fp8_decode(uint8_t code, const Fp8Format& f) {
  const uint32_t sign = code >> 7, body = code & 0x7F;
  const uint32_t exponent = body >> f.mantissa_bits,
                 mantissa = body & ((1u << f.mantissa_bits) - 1);
  const int bias = (1 << (f.exponent_bits - 1)) - 1;
  if (f.has_infinity && exponent == (1u << f.exponent_bits) - 1)
    return bits_float(sign << 31 | 0x7F800000u | (mantissa ? 0x400000u : 0u));
  if (!f.has_infinity && body == 0x7F) return bits_float(sign << 31 | 0x7FC00000u);
  // Subnormals: mantissa * 2^(1 - bias - mantissa_bits); both cases are exact in float.
  const uint32_t significand = exponent ? mantissa | (1u << f.mantissa_bits) : mantissa;
  const int power = static_cast<int>(exponent ? exponent : 1) - bias - f.mantissa_bits;
  const float magnitude =
      static_cast<float>(significand) * bits_float(static_cast<uint32_t>(power + 127) << 23);
  return sign ? -magnitude : magnitude;
}

TEA_HOST_DEVICE uint8_t fp8_encode(float x, const Fp8Format& f) {
  const uint32_t bits = float_bits(x), magnitude = bits & 0x7FFFFFFFu;
  const uint8_t sign = static_cast<uint8_t>(bits >> 24 & 0x80);
  if (magnitude > 0x7F800000u) return sign | 0x7F;  // NaN
  if (bits_float(magnitude) >= f.largest) {
    const uint32_t top =
        f.has_infinity ? (1u << (f.exponent_bits + f.mantissa_bits)) - (1u << f.mantissa_bits) - 1
                       : 0x7Eu;
    return sign | static_cast<uint8_t>(top);
  }
  const int bias = (1 << (f.exponent_bits - 1)) - 1;
  int exponent = static_cast<int>(magnitude >> 23) - 127 + bias;
  uint32_t significand = (magnitude & 0x7FFFFFu) | (magnitude >> 23 ? 0x800000u : 0u);
  int shift = 23 - f.mantissa_bits;
  if (exponent < 1) {  // the result is subnormal: align to exponent 1
    shift += 1 - exponent;
    exponent = 1;
    if (shift > 25) return sign;
  }
  const uint32_t half = 1u << (shift - 1), rest = significand & ((1u << shift) - 1);
  significand >>= shift;
  if (rest > half || (rest == half && (significand & 1))) ++significand;
  // The addition propagates a carry out of the mantissa into the exponent.
  return sign | static_cast<uint8_t>((static_cast<uint32_t>(exponent - 1) << f.mantissa_bits) +
                                     significand);
}

TEA_HOST_DEVICE float bf16_decode(uint16_t code) { return bits_float(uint32_t{code} << 16); }
TEA_HOST_DEVICE uint16_t bf16_encode(float x) {
  const uint32_t bits = float_bits(x);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7FFFu + (bits >> 16 & 1)) >> 16);
}

TEA_HOST_DEVICE float fp16_decode(uint16_t code) {
  const uint32_t sign = uint32_t{code} >> 15 << 31, exponent = code >> 10 & 31,
                 mantissa = code & 0x3FF;
  if (exponent == 31) return bits_float(sign | 0x7F800000u | mantissa << 13);
  if (exponent) return bits_float(sign | (exponent + 112) << 23 | mantissa << 13);
  const float magnitude = static_cast<float>(mantissa) * bits_float((127u - 24) << 23);
  return sign ? -magnitude : magnitude;
}
TEA_HOST_DEVICE uint16_t fp16_encode(float x) {
  const uint32_t bits = float_bits(x), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return static_cast<uint16_t>(sign | 0x7E00u);
  if (magnitude >= 0x477FF000u) return static_cast<uint16_t>(sign | 0x7C00u);  // rounds past 65504
  int shift = 13, exponent = static_cast<int>(magnitude >> 23) - 112;
  uint32_t significand = (magnitude & 0x7FFFFFu) | (magnitude >> 23 ? 0x800000u : 0u);
  if (exponent < 1) {
    shift += 1 - exponent;
    exponent = 1;
    if (shift > 25) return static_cast<uint16_t>(sign);
  }
  const uint32_t half = 1u << (shift - 1), rest = significand & ((1u << shift) - 1);
  significand >>= shift;
  if (rest > half || (rest == half && (significand & 1))) ++significand;
  return static_cast<uint16_t>(sign | ((static_cast<uint32_t>(exponent - 1) << 10) + significand));
}

}  // namespace tea
