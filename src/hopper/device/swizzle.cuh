// The swizzle that TMA and wgmma apply to shared memory so that the same column of consecutive rows
// falls into different banks: the index of a 16-byte chunk is XORed with the row's index within the
// pattern.
#pragma once
#include <cstdint>

namespace tea::hopper {

// The value is the width in bytes of a row of the pattern, which repeats every eight rows. Tiles
// start at a multiple of eight rows.
enum class Swizzle : int { kNone = 16, k32 = 32, k64 = 64, k128 = 128 };

__host__ __device__ constexpr int width(Swizzle s) { return static_cast<int>(s); }

// Byte offset of byte `at` of row `row`. One formula serves every width: address bits 4 and up are
// XORed with bits 7 and up, as many of them as are needed to number the chunks of a row.
__host__ __device__ constexpr uint32_t swizzled(Swizzle s, uint32_t row, uint32_t at) {
  const uint32_t offset = row * width(s) + at;
  return offset ^ (offset >> 3 & (width(s) - 16));
}

}  // namespace tea::hopper
