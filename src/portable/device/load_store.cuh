// Elements between global memory and tiles or registers: the six formats, eight elements at a time.
#pragma once
#include "gpu/arguments.h"
#include "math/formats.h"
#include "math/load_store.h"
#include "portable/device/tile.cuh"

namespace tea::portable {

// Two E4M3 codes as two halves, exactly: the code's bits in place of a half's mean 2^-8 of its
// value, but for the NaN of E4M3.
TEA_DEVICE uint32_t halves_of_e4m3(uint32_t codes) {
  const uint32_t low = codes & 0xFF, high = codes >> 8 & 0xFF;
  const uint32_t body = (low & 0x7F) << 7 | (high & 0x7F) << 23;
  uint32_t magnitude;
  asm("mul.f16x2 %0, %1, %2;\n" : "=r"(magnitude) : "r"(body), "r"(0x5C005C00));  // 2^8
  if ((low & 0x7F) == 0x7F) magnitude = (magnitude & 0xFFFF0000) | 0x7E00;
  if ((high & 0x7F) == 0x7F) magnitude = (magnitude & 0x0000FFFF) | 0x7E000000;
  return magnitude | (low & 0x80) << 8 | (high & 0x80) << 24;
}
// An E5M2 code is the upper half of a half.
TEA_DEVICE uint32_t halves_of_e5m2(uint32_t codes) {
  return (codes & 0xFF) << 8 | (codes & 0xFF00) << 16;
}
TEA_DEVICE uint32_t halves_of_fp8(uint32_t codes, int32_t dtype) {
  return dtype == TEA_E4M3 ? halves_of_e4m3(codes) : halves_of_e5m2(codes);
}
TEA_DEVICE uint16_t half_of_fp8(uint8_t code, int32_t dtype) {
  return static_cast<uint16_t>(halves_of_fp8(code, dtype));
}

// Eight elements into a tile at (row, column), or zeros. `from` counts bytes to the first; wide:
// Rows::wide. Copies may still be under way afterwards (commit_copies, wait_copies).
template <int kDtype, int kDim>
TEA_DEVICE void copy_eight(const Tile<kDtype, kDim>& tile, int row, int column, const char* from,
                           bool valid) {
  constexpr int kPieces = kElementBytes<kDtype> / 2;
#pragma unroll
  for (int i = 0; i < kPieces; ++i)
    copy_16(tile.piece(row, column * kElementBytes<kDtype> / 16 + i), from + 16 * i, valid);
}

// The same in any alignment and for fp8 too, through registers.
template <int kDtype, int kDim>
TEA_DEVICE void load_eight(const Tile<kDtype, kDim>& tile, int row, int column, const char* from,
                           const StridedTensor& rows, bool valid) {
  constexpr int kPieces = kElementBytes<kDtype> / 2;
  uint32_t word[4 * kPieces] = {};
  if (valid) {
    if (kDtype == TEA_FP16 && is_fp8(rows.dtype)) {
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
      word[0] = halves_of_fp8(codes.x, rows.dtype);
      word[1] = halves_of_fp8(codes.x >> 16, rows.dtype);
      word[2] = halves_of_fp8(codes.y, rows.dtype);
      word[3] = halves_of_fp8(codes.y >> 16, rows.dtype);
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
  for (int i = 0; i < kPieces; ++i)
    store_shared_16(tile.piece(row, column * kElementBytes<kDtype> / 16 + i),
                    {word[4 * i], word[4 * i + 1], word[4 * i + 2], word[4 * i + 3]});
}

// To nearest even, saturating.
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

// One element as a float; exact for every type but fp64.
TEA_DEVICE float load_float(const void* data, int32_t dtype, int64_t index) {
  switch (dtype) {
    case TEA_FP16:
      return half_to_float(static_cast<const uint16_t*>(data)[index]);
    case TEA_BF16:
      return bf16_decode(static_cast<const uint16_t*>(data)[index]);
    case TEA_E4M3:
    case TEA_E5M2:
      return half_to_float(half_of_fp8(static_cast<const uint8_t*>(data)[index], dtype));
    default:
      return static_cast<const float*>(data)[index];
  }
}

// A float rounded once to the type.
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

// As an fp8 type would hold it; other types keep the value.
TEA_DEVICE float cast_fp8(float x, int32_t dtype) {
  return is_fp8(dtype) ? half_to_float(half_of_fp8(to_fp8(x, dtype), dtype)) : x;
}

}  // namespace tea::portable
