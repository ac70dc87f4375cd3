// One element of a buffer whose type is a tea_dtype, as a double. Loads are exact; stores round to
// nearest even once, for every format.
#pragma once
#include <cmath>
#include <cstdint>

#include "math/formats.h"
#include "te_attention.h"

namespace tea {

TEA_HOST_DEVICE bool is_fp8(int32_t dtype) { return dtype == TEA_E4M3 || dtype == TEA_E5M2; }

// Rounds to odd: if x is not exact, the adjacent float with an odd last bit. A second rounding, to
// any narrower format, then gives the same result as rounding x directly (Boldo and Melquiond,
// "When double rounding is odd", 2005).
TEA_HOST_DEVICE float rounded_to_odd(double x) {
  const float nearest = static_cast<float>(x);
  const uint32_t bits = float_bits(nearest);
  if (!(fabs(x - static_cast<double>(nearest)) > 0) || (bits & 1)) return nearest;
  return bits_float(fabs(static_cast<double>(nearest)) < fabs(x) ? bits + 1 : bits - 1);
}

// The caller has checked that dtype is one of the six formats; any other loads as NaN.
TEA_HOST_DEVICE double load_real(const void* data, int32_t dtype, int64_t index) {
  switch (dtype) {
    case TEA_FP16:
      return fp16_decode(static_cast<const uint16_t*>(data)[index]);
    case TEA_BF16:
      return bf16_decode(static_cast<const uint16_t*>(data)[index]);
    case TEA_FP32:
      return static_cast<const float*>(data)[index];
    case TEA_FP64:
      return static_cast<const double*>(data)[index];
    case TEA_E4M3:
      return fp8_decode(static_cast<const uint8_t*>(data)[index], kE4M3);
    case TEA_E5M2:
      return fp8_decode(static_cast<const uint8_t*>(data)[index], kE5M2);
    default:
      return NAN;
  }
}

// Casts to fp8 saturate to the largest finite value; NaN stays NaN. Any other dtype stores nothing.
TEA_HOST_DEVICE void store_real(void* data, int32_t dtype, int64_t index, double value) {
  switch (dtype) {
    case TEA_FP16:
      static_cast<uint16_t*>(data)[index] = fp16_encode(rounded_to_odd(value));
      break;
    case TEA_BF16:
      static_cast<uint16_t*>(data)[index] = bf16_encode(rounded_to_odd(value));
      break;
    case TEA_FP32:
      static_cast<float*>(data)[index] = static_cast<float>(value);
      break;
    case TEA_FP64:
      static_cast<double*>(data)[index] = value;
      break;
    case TEA_E4M3:
      static_cast<uint8_t*>(data)[index] = fp8_encode(rounded_to_odd(value), kE4M3);
      break;
    case TEA_E5M2:
      static_cast<uint8_t*>(data)[index] = fp8_encode(rounded_to_odd(value), kE5M2);
      break;
    default:
      break;
  }
}

// x rounded to an fp8 type.
TEA_HOST_DEVICE double cast_to_fp8(double x, int32_t dtype) {
  const Fp8Format& format = dtype == TEA_E4M3 ? kE4M3 : kE5M2;
  return fp8_decode(fp8_encode(rounded_to_odd(x), format), format);
}

}  // namespace tea
