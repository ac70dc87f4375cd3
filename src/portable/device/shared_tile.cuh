// Tiles of Q, K, V and P in shared memory. A row is kDim elements without padding; its 16-byte
// chunks are XOR-swizzled by the row's number, so that the lanes of one access use different banks.
// FP8 operands are stored as fp16, which holds each code exactly.
#pragma once
#include "portable/device/ptx.cuh"

namespace tea::portable {

// The size of an element in shared memory; kDtype is TEA_FP16, TEA_BF16 or TEA_FP32.
template <int kDtype>
inline constexpr int kElementBytes = kDtype == TEA_FP32 ? 4 : 2;

template <int kDtype, int kDim>
struct SharedTile {
  static constexpr int kBytes = kElementBytes<kDtype>, kRowBytes = kDim * kBytes;
  static constexpr int kChunks = kRowBytes / 16;  // of a row
  static_assert(kRowBytes % 128 == 0, "the swizzle works within 128 bytes");
  uint32_t address;  // a multiple of 128

  // The XOR mask of a row's chunk numbers. ldmatrix reads one chunk of eight consecutive rows. The
  // fp32 fragments read two adjacent chunks of four consecutive rows or of every second row: with
  // the Gray code of the row, neither access has bank conflicts.
  static TEA_DEVICE int swizzle(int row) {
    return kDtype == TEA_FP32 ? ((row ^ row >> 1) & 3) << 1 : row & 7;
  }
  TEA_DEVICE uint32_t chunk(int row, int number) const {
    return address + row * kRowBytes + (number ^ swizzle(row)) * 16;
  }
  // The address of one element.
  TEA_DEVICE uint32_t at(int row, int column) const {
    constexpr int kPer = 16 / kBytes;
    return chunk(row, column / kPer) + column % kPer * kBytes;
  }
  // The address `row` rows and `column` columns after a lane's address, which is within the first
  // 128 bytes of its row; `row` is a multiple of 8, `column` one of 32 bytes. So one register per
  // lane holds the addresses of all fragments of a tile.
  static TEA_DEVICE uint32_t offset_by(uint32_t lane_address, int row, int column) {
    const int bytes = column * kBytes;
    return (lane_address ^ bytes % 128) + (row * kRowBytes + bytes / 128 * 128);
  }
  // fp32: the same, `odd` (0 or 1) rows further, from an even row.
  static TEA_DEVICE uint32_t offset_by_odd(uint32_t lane_address, int row, int column, int odd) {
    return offset_by(lane_address ^ 32 * odd, row, column) + odd * kRowBytes;
  }
};

// A tile from row `first` on, or from column `first` on. As much of the offset as possible goes
// into the address, so that the fragments' distances from it are constants.
template <class T>
struct TileOffset {
  T tile;
  int first;  // the row or column that remains
};
template <bool kRows, int kDtype, int kDim>
TEA_DEVICE TileOffset<SharedTile<kDtype, kDim>> offset_of(const SharedTile<kDtype, kDim>& tile,
                                                          int first) {
  using T = SharedTile<kDtype, kDim>;
  constexpr int kColumns = 128 / T::kBytes;  // within which chunks are swizzled
  if (kRows) return {{tile.address + first * T::kRowBytes}, 0};
  return {{tile.address + first / kColumns * 128}, first % kColumns};
}

template <int kDtype, int kDim>
TEA_DEVICE void store_element(const SharedTile<kDtype, kDim>& tile, int row, int column, float x) {
  if constexpr (kDtype == TEA_FP32)
    store_shared_4(tile.at(row, column), __float_as_uint(x));
  else
    store_shared_2(tile.at(row, column), static_cast<uint16_t>(pack<kDtype>(x, 0)));
}
// Stores two adjacent elements, the first in an even column.
template <int kDtype, int kDim>
TEA_DEVICE void store_pair(const SharedTile<kDtype, kDim>& tile, int row, int column, float a,
                           float b) {
  if constexpr (kDtype == TEA_FP32)
    store_shared_float2(tile.at(row, column), {a, b});
  else
    store_shared_4(tile.at(row, column), pack<kDtype>(a, b));
}

}  // namespace tea::portable
