// Loads and stores of tensor elements of every format, and asynchronous copies of eight elements
// to a tile in shared memory.
#pragma once
#include "gpu/arguments.h"
#include "math/formats.h"
#include "math/load_store.h"
#include "portable/device/shared_tile.cuh"

namespace tea::portable {

// Converts two E4M3 codes to two halves exactly. The bits of a code, at the position of a half's
// exponent and significand, mean 2^-8 of the code's value, except for the NaN of E4M3.
TEA_DEVICE uint32_t e4m3_to_halves(uint32_t codes) {
  const uint32_t low = codes & 0xFF, high = codes >> 8 & 0xFF;
  const uint32_t body = (low & 0x7F) << 7 | (high & 0x7F) << 23;
  uint32_t magnitude;
  asm("mul.f16x2 %0, %1, %2;\n" : "=r"(magnitude) : "r"(body), "r"(0x5C005C00));  // 2^8
  if ((low & 0x7F) == 0x7F) magnitude = (magnitude & 0xFFFF0000) | 0x7E00;
  if ((high & 0x7F) == 0x7F) magnitude = (magnitude & 0x0000FFFF) | 0x7E000000;
  return magnitude | (low & 0x80) << 8 | (high & 0x80) << 24;
}
// An E5M2 code is the upper byte of a half.
TEA_DEVICE uint32_t e5m2_to_halves(uint32_t codes) {
  return (codes & 0xFF) << 8 | (codes & 0xFF00) << 16;
}
TEA_DEVICE uint32_t fp8_to_halves(uint32_t codes, int32_t dtype) {
  return dtype == TEA_E4M3 ? e4m3_to_halves(codes) : e5m2_to_halves(codes);
}
TEA_DEVICE uint16_t fp8_to_half(uint8_t code, int32_t dtype) {
  return static_cast<uint16_t>(fp8_to_halves(code, dtype));
}
// Two codes as a pair of fp16 or bf16, either of which holds each code exactly.
template <int kDtype>
TEA_DEVICE uint32_t fp8_to_pair(uint32_t codes, int32_t dtype) {
  const uint32_t halves = fp8_to_halves(codes, dtype);
  if constexpr (kDtype != TEA_BF16) return halves;
  return pack<TEA_BF16>(half_to_float(static_cast<uint16_t>(halves)),
                        half_to_float(static_cast<uint16_t>(halves >> 16)));
}

// Copies eight elements to (row, column) of a tile asynchronously; unless valid, zeros. The tensor
// must be vectorizable.
template <int kDtype, int kDim>
TEA_DEVICE void cp_async_8_elements(const SharedTile<kDtype, kDim>& tile, int row, int column,
                                    const char* from, bool valid) {
  constexpr int kChunks = kElementBytes<kDtype> / 2;
#pragma unroll
  for (int i = 0; i < kChunks; ++i)
    cp_async_16(tile.chunk(row, column * kElementBytes<kDtype> / 16 + i), from + 16 * i, valid);
}

// The same through registers, for any alignment and for FP8 as well.
template <int kDtype, int kDim>
TEA_DEVICE void load_8_elements(const SharedTile<kDtype, kDim>& tile, int row, int column,
                                const char* from, const StridedTensor& rows, bool valid) {
  constexpr int kChunks = kElementBytes<kDtype> / 2;
  uint32_t word[4 * kChunks] = {};
  if (valid) {
    if (kDtype != TEA_FP32 && is_fp8(rows.dtype)) {
      uint2 codes = {};
      if (rows.is_vectorizable) {
        codes = *reinterpret_cast<const uint2*>(from);
      } else {
        const auto* code = reinterpret_cast<const uint8_t*>(from);
        for (int i = 0; i < 4; ++i) {
          codes.x |= uint32_t{code[i]} << 8 * i;
          codes.y |= uint32_t{code[4 + i]} << 8 * i;
        }
      }
      word[0] = fp8_to_pair<kDtype>(codes.x, rows.dtype);
      word[1] = fp8_to_pair<kDtype>(codes.x >> 16, rows.dtype);
      word[2] = fp8_to_pair<kDtype>(codes.y, rows.dtype);
      word[3] = fp8_to_pair<kDtype>(codes.y >> 16, rows.dtype);
    } else if constexpr (kDtype == TEA_FP32) {
      const auto* element = reinterpret_cast<const uint32_t*>(from);
#pragma unroll
      for (int i = 0; i < 8; ++i) word[i] = element[i];
    } else {
      const auto* element = reinterpret_cast<const uint16_t*>(from);
#pragma unroll
      for (int i = 0; i < 4; ++i) word[i] = element[2 * i] | uint32_t{element[2 * i + 1]} << 16;
    }
  }
#pragma unroll
  for (int i = 0; i < kChunks; ++i)
    store_shared_16(tile.chunk(row, column * kElementBytes<kDtype> / 16 + i),
                    {word[4 * i], word[4 * i + 1], word[4 * i + 2], word[4 * i + 3]});
}

// Rounds to nearest even and saturates.
TEA_DEVICE uint8_t to_fp8(float x, int32_t dtype) {
#if __CUDA_ARCH__ >= 890
  uint16_t both;
  if (dtype == TEA_E4M3)
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;\n" : "=h"(both) : "f"(0.0f), "f"(x));
  else
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;\n" : "=h"(both) : "f"(0.0f), "f"(x));
  return static_cast<uint8_t>(both);
#else
  constexpr Fp8Format e4m3 = kE4M3, e5m2 = kE5M2;
  return dtype == TEA_E4M3 ? fp8_encode(x, e4m3) : fp8_encode(x, e5m2);
#endif
}

// Loads one element as a float, exactly for every type that the engine accepts.
TEA_DEVICE float load_float(const void* data, int32_t dtype, int64_t index) {
  switch (dtype) {
    case TEA_FP16:
      return half_to_float(static_cast<const uint16_t*>(data)[index]);
    case TEA_BF16:
      return bf16_decode(static_cast<const uint16_t*>(data)[index]);
    case TEA_E4M3:
    case TEA_E5M2:
      return half_to_float(fp8_to_half(static_cast<const uint8_t*>(data)[index], dtype));
    default:
      return static_cast<const float*>(data)[index];
  }
}

// Rounds a float once to the type and stores it.
TEA_DEVICE void store_float(void* data, int32_t dtype, int64_t index, float value) {
  switch (dtype) {
    case TEA_FP16:
      static_cast<uint16_t*>(data)[index] = static_cast<uint16_t>(pack<TEA_FP16>(value, 0));
      break;
    case TEA_BF16:
      static_cast<uint16_t*>(data)[index] = static_cast<uint16_t>(pack<TEA_BF16>(value, 0));
      break;
    case TEA_E4M3:
    case TEA_E5M2:
      static_cast<uint8_t*>(data)[index] = to_fp8(value, dtype);
      break;
    default:
      static_cast<float*>(data)[index] = value;
  }
}

// Rounds to an FP8 type; for other types, returns the value.
TEA_DEVICE float cast_fp8(float x, int32_t dtype) {
  return is_fp8(dtype) ? half_to_float(fp8_to_half(to_fp8(x, dtype), dtype)) : x;
}

}  // namespace tea::portable
