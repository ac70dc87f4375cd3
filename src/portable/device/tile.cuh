// Tiles in shared memory and the fragments of matrix instructions. A tile's row is kDim elements
// without padding; its 16-byte pieces are permuted by the row's number, so that what the lanes of
// one access touch lies in different banks.
//
// One set of words serves 16-bit types (mma m16n8k16) and fp32, as three products of TF32
// (m16n8k8 on the high and low halves of the significand; what is dropped is below 2^-21 of a
// product). A step of the summed dimension is 16 elements in both. fp8 lies in tiles as fp16.
#pragma once
#include "portable/device/ptx.cuh"

namespace tea::portable {

// How an element lies in shared memory: kDtype is TEA_FP16, TEA_BF16 or TEA_FP32.
template <int kDtype>
inline constexpr int kElementBytes = kDtype == TEA_FP32 ? 4 : 2;

template <int kDtype, int kDim>
struct Tile {
  static constexpr int kBytes = kElementBytes<kDtype>, kRowBytes = kDim * kBytes;
  static constexpr int kPieces = kRowBytes / 16;  // of a row
  static_assert(kRowBytes % 128 == 0, "the permutation works within 128 bytes");
  uint32_t address;  // a multiple of 128

  // ldmatrix reads one piece of eight rows in sequence. The fp32 fragments read two neighbouring
  // pieces of four rows in sequence or of every second row: the Gray code keeps both apart.
  static TEA_DEVICE int permutation(int row) {
    return kDtype == TEA_FP32 ? ((row ^ row >> 1) & 3) << 1 : row & 7;
  }
  TEA_DEVICE uint32_t piece(int row, int number) const {
    return address + row * kRowBytes + (number ^ permutation(row)) * 16;
  }
  // Of one element.
  TEA_DEVICE uint32_t at(int row, int column) const {
    constexpr int kPer = 16 / kBytes;
    return piece(row, column / kPer) + column % kPer * kBytes;
  }
  // The address `row` rows and `column` columns on from a lane's, which is within the first 128
  // bytes of its row; row is a multiple of 8 and column of 32 bytes. So one register per lane
  // serves all fragments of a tile.
  static TEA_DEVICE uint32_t moved(uint32_t lane_address, int row, int column) {
    const int bytes = column * kBytes;
    return (lane_address ^ bytes % 128) + (row * kRowBytes + bytes / 128 * 128);
  }
  // fp32: the same, `odd` (0 or 1) rows further, from an even row.
  static TEA_DEVICE uint32_t moved_odd(uint32_t lane_address, int row, int column, int odd) {
    return moved(lane_address ^ 32 * odd, row, column) + odd * kRowBytes;
  }
};

// Where a lane stands in the fragments below: two maps for ldmatrix, two for fp32.
template <int kDtype, int kDim>
TEA_DEVICE uint32_t row_lanes(const Tile<kDtype, kDim>& tile, int l) {  // matrices below, beside
  if constexpr (kDtype == TEA_FP32) return tile.at(l / 4, l % 4 * 2);
  return tile.piece(l % 16, l / 16);
}
template <int kDtype, int kDim>
TEA_DEVICE uint32_t column_lanes(const Tile<kDtype, kDim>& tile, int l) {  // beside, below
  if constexpr (kDtype == TEA_FP32) return tile.at(l % 4 * 2, l / 4);
  return tile.piece(l / 16 * 8 + l % 8, l / 8 % 2);
}

template <int kDtype, int kDim>
TEA_DEVICE void store_one(const Tile<kDtype, kDim>& tile, int row, int column, float x) {
  if constexpr (kDtype == TEA_FP32)
    store_shared_4(tile.at(row, column), __float_as_uint(x));
  else
    store_shared_2(tile.at(row, column), static_cast<uint16_t>(pack<kDtype>(x, 0)));
}
// Two neighbouring elements, the first in an even column.
template <int kDtype, int kDim>
TEA_DEVICE void store_two(const Tile<kDtype, kDim>& tile, int row, int column, float a, float b) {
  if constexpr (kDtype == TEA_FP32)
    store_shared_float2(tile.at(row, column), {a, b});
  else
    store_shared_4(tile.at(row, column), pack<kDtype>(a, b));
}

// 16 rows by 16 columns as the left operand. The words' comments name (row, column) with
// g = lane / 4 and t = lane % 4.
template <int kDtype>
struct Left {
  uint32_t r[4];  // (g, 2t..), (g+8, 2t..), (g, 8+2t..), (g+8, 8+2t..), two elements each
};
template <>
struct Left<TEA_FP32> {
  float x[2][4];  // of columns 8s..: (g, 2t), (g+8, 2t), (g, 2t+1), (g+8, 2t+1)
};
// 16 of the summed dimension by 16 columns as the right operand.
template <int kDtype>
struct Right {
  uint32_t r[4];  // columns 0..7: summed 2t.., 8+2t.. of column g; then columns 8..15
};
template <>
struct Right<TEA_FP32> {
  float x[2][2][2];  // [columns 8n..][summed 8s..]: summed 2t, 2t+1 of column 8n + g
};

// Rows and columns below are multiples of 16.
//
// Stored [row][summed].
template <int kDtype, int kDim>
TEA_DEVICE Left<kDtype> load_left(const Tile<kDtype, kDim>& tile, int row, int summed,
                                  int l = lane()) {
  Left<kDtype> a;
  const uint32_t lanes = row_lanes(tile, l);
  if constexpr (kDtype == TEA_FP32) {
#pragma unroll
    for (int s = 0; s < 2; ++s)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 x = load_shared_float2(tile.moved(lanes, row + 8 * half, summed + 8 * s));
        a.x[s][half] = x.x, a.x[s][2 + half] = x.y;
      }
  } else {
    ldmatrix_x4(a.r, tile.moved(lanes, row, summed));
  }
  return a;
}
// Stored [summed][row].
template <int kDtype, int kDim>
TEA_DEVICE Left<kDtype> load_left_transposed(const Tile<kDtype, kDim>& tile, int row, int summed,
                                             int l = lane()) {
  Left<kDtype> a;
  const uint32_t lanes = column_lanes(tile, l);
  if constexpr (kDtype == TEA_FP32) {
#pragma unroll
    for (int s = 0; s < 2; ++s)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        a.x[s][i] =
            load_shared_float(tile.moved_odd(lanes, summed + 8 * s, row + 8 * (i % 2), i / 2));
  } else {
    ldmatrix_x4_trans(a.r, tile.moved(lanes, summed, row));
  }
  return a;
}
// Stored [column][summed].
template <int kDtype, int kDim>
TEA_DEVICE Right<kDtype> load_right(const Tile<kDtype, kDim>& tile, int column, int summed,
                                    int l = lane()) {
  Right<kDtype> b;
  if constexpr (kDtype == TEA_FP32) {
    const uint32_t lanes = row_lanes(tile, l);
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        const float2 x = load_shared_float2(tile.moved(lanes, column + 8 * n, summed + 8 * s));
        b.x[n][s][0] = x.x, b.x[n][s][1] = x.y;
      }
  } else {
    ldmatrix_x4(b.r, tile.moved(column_lanes(tile, l), column, summed));
  }
  return b;
}
// Stored [summed][column].
template <int kDtype, int kDim>
TEA_DEVICE Right<kDtype> load_right_transposed(const Tile<kDtype, kDim>& tile, int column,
                                               int summed, int l = lane()) {
  Right<kDtype> b;
  if constexpr (kDtype == TEA_FP32) {
    const uint32_t lanes = column_lanes(tile, l);
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int s = 0; s < 2; ++s)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          b.x[n][s][i] =
              load_shared_float(tile.moved_odd(lanes, summed + 8 * s, column + 8 * n, i));
  } else {
    ldmatrix_x4_trans(b.r, tile.moved(row_lanes(tile, l), summed, column));
  }
  return b;
}

// x = high + low, both of 11 significant bits, but for the rest.
struct Split {
  uint32_t high, low;
  TEA_DEVICE explicit Split(float x) : high(round_tf32(x)) {
    low = round_tf32(x - __uint_as_float(high));
  }
};

// 16 rows by 16 columns: c[n] += a b for columns 8n..
template <int kDtype>
TEA_DEVICE void multiply(float (&c0)[4], float (&c1)[4], const Left<kDtype>& a,
                         const Right<kDtype>& b) {
  if constexpr (kDtype == TEA_FP32) {
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      uint32_t high[4], low[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const Split x(a.x[s][i]);
        high[i] = x.high, low[i] = x.low;
      }
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        float(&c)[4] = n ? c1 : c0;
        const Split b0(b.x[n][s][0]), b1(b.x[n][s][1]);
        multiply_tf32(c, low, b0.high, b1.high);
        multiply_tf32(c, high, b0.low, b1.low);
        multiply_tf32(c, high, b0.high, b1.high);
      }
    }
  } else {
    multiply_16<kDtype>(c0, a.r, b.r[0], b.r[1]);
    multiply_16<kDtype>(c1, a.r, b.r[2], b.r[3]);
  }
}

// Which of its two words reads an operand: as the summed dimension lies along the rows of the tile,
// or across them.
enum class Summed { kAlongRows, kAcrossRows };

// A tile from row `first` on, or from a column on: what can go into the address does, so that the
// fragments' distances from it are constant.
template <class T>
struct TilePart {
  T tile;
  int first;  // row or column that remains
};
template <bool kRows, int kDtype, int kDim>
TEA_DEVICE TilePart<Tile<kDtype, kDim>> part_of(const Tile<kDtype, kDim>& tile, int first) {
  using T = Tile<kDtype, kDim>;
  constexpr int kWhole = 128 / T::kBytes;  // columns within which pieces are permuted
  if (kRows) return {{tile.address + first * T::kRowBytes}, 0};
  return {{tile.address + first / kWhole * 128}, first % kWhole};
}

// c += a b over 16 kSteps of the summed dimension: rows from `row` of a, columns from `column` of
// b.
template <int kDtype, int kSteps, Summed kOfLeft, Summed kOfRight, int kRows16, int kTiles, class A,
          class B>
TEA_DEVICE void multiply_tiles(float (&c)[kRows16][kTiles][4], const A& a, int row, const B& b,
                               int column) {
  const int l = afresh_thread(lane());
  constexpr bool kLeftAlong = kOfLeft == Summed::kAlongRows,
                 kRightAlong = kOfRight == Summed::kAlongRows;
  const auto left_part = part_of<kLeftAlong>(a, row);
  const auto right_part = part_of<kRightAlong>(b, column);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    Left<kDtype> left[kRows16];
#pragma unroll
    for (int m = 0; m < kRows16; ++m)
      left[m] = kLeftAlong
                    ? load_left(left_part.tile, left_part.first + 16 * m, 16 * step, l)
                    : load_left_transposed(left_part.tile, left_part.first + 16 * m, 16 * step, l);
#pragma unroll
    for (int n = 0; n < kTiles / 2; ++n) {
      const Right<kDtype> right =
          kRightAlong
              ? load_right(right_part.tile, right_part.first + 16 * n, 16 * step, l)
              : load_right_transposed(right_part.tile, right_part.first + 16 * n, 16 * step, l);
#pragma unroll
      for (int m = 0; m < kRows16; ++m)
        multiply<kDtype>(c[m][2 * n], c[m][2 * n + 1], left[m], right);
    }
  }
}

// The accumulators of columns 16s.. and 16s + 8.. as a left operand over those columns.
template <int kDtype>
TEA_DEVICE Left<kDtype> as_left(const float (&c0)[4], const float (&c1)[4]) {
  Left<kDtype> a;
  if constexpr (kDtype == TEA_FP32) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int from = i % 2 * 2 + i / 2;  // accumulators go row by row
      a.x[0][i] = c0[from], a.x[1][i] = c1[from];
    }
  } else {
    a.r[0] = pack<kDtype>(c0[0], c0[1]), a.r[1] = pack<kDtype>(c0[2], c0[3]);
    a.r[2] = pack<kDtype>(c1[0], c1[1]), a.r[3] = pack<kDtype>(c1[2], c1[3]);
  }
  return a;
}

}  // namespace tea::portable
