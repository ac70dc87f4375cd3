// How the copy engine and the matrix units permute 16-byte pieces of shared memory, so that a
// column of rows touches every bank: the piece's index is xor-ed with the row's within the pattern.
#pragma once
#include <cstdint>

namespace tea::hopper {

// The value is the width in bytes of a tile's row; the pattern repeats every eight rows, and a tile
// starts at a multiple of eight rows.
enum class Swizzle : int { kNone = 16, k32 = 32, k64 = 64, k128 = 128 };

__host__ __device__ constexpr int width(Swizzle s) { return static_cast<int>(s); }

// Byte offset of byte `at` of row `row`. One formula serves all widths: address bits 4.. are xor-ed
// with bits 7.., as many as the width has pieces.
__host__ __device__ constexpr uint32_t swizzled(Swizzle s, uint32_t row, uint32_t at) {
  const uint32_t offset = row * width(s) + at;
  return offset ^ (offset >> 3 & (width(s) - 16));
}

}  // namespace tea::hopper
