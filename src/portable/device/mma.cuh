// Fragments of mma.sync operands and products of tiles in shared memory.
//
// The same functions serve 16-bit types (mma m16n8k16) and fp32, as three products of TF32
// (m16n8k8 on the high and low halves of the significand; the dropped terms are below 2^-21 of a
// product). A step of k is 16 elements in both.
#pragma once
#include "portable/device/shared_tile.cuh"

namespace tea::portable {

// A lane's address in the fragments below: the 8x8 matrices of an ldmatrix_x4 in the order below,
// right; or right, below.
template <int kDtype, int kDim>
TEA_DEVICE uint32_t lane_address(const SharedTile<kDtype, kDim>& tile, int l) {
  if constexpr (kDtype == TEA_FP32) return tile.at(l / 4, l % 4 * 2);
  return tile.chunk(l % 16, l / 16);
}
template <int kDtype, int kDim>
TEA_DEVICE uint32_t lane_address_transposed(const SharedTile<kDtype, kDim>& tile, int l) {
  if constexpr (kDtype == TEA_FP32) return tile.at(l % 4 * 2, l / 4);
  return tile.chunk(l / 16 * 8 + l % 8, l / 8 % 2);
}

// 16 rows of A by 16 of k. The comments name (row, k) with g = lane / 4 and t = lane % 4.
template <int kDtype>
struct FragmentA {
  uint32_t r[4];  // (g, 2t..), (g+8, 2t..), (g, 8+2t..), (g+8, 8+2t..), two elements each
};
template <>
struct FragmentA<TEA_FP32> {
  float x[2][4];  // of k = 8s..: (g, 2t), (g+8, 2t), (g, 2t+1), (g+8, 2t+1)
};
// 16 of k by 16 columns of B.
template <int kDtype>
struct FragmentB {
  uint32_t r[4];  // columns 0..7: k = 2t.., 8+2t.. of column g; then columns 8..15
};
template <>
struct FragmentB<TEA_FP32> {
  float x[2][2][2];  // [columns 8n..][k = 8s..]: k = 2t, 2t+1 of column 8n + g
};

// Rows, columns and k below are multiples of 16.
//
// A, stored [row][k].
template <int kDtype, int kDim>
TEA_DEVICE FragmentA<kDtype> load_a(const SharedTile<kDtype, kDim>& tile, int row, int k,
                                    int l = lane()) {
  FragmentA<kDtype> a;
  const uint32_t from = lane_address(tile, l);
  if constexpr (kDtype == TEA_FP32) {
#pragma unroll
    for (int s = 0; s < 2; ++s)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 x = load_shared_float2(tile.offset_by(from, row + 8 * half, k + 8 * s));
        a.x[s][half] = x.x, a.x[s][2 + half] = x.y;
      }
  } else {
    ldmatrix_x4(a.r, tile.offset_by(from, row, k));
  }
  return a;
}
// A, stored [k][row].
template <int kDtype, int kDim>
TEA_DEVICE FragmentA<kDtype> load_a_transposed(const SharedTile<kDtype, kDim>& tile, int row, int k,
                                               int l = lane()) {
  FragmentA<kDtype> a;
  const uint32_t from = lane_address_transposed(tile, l);
  if constexpr (kDtype == TEA_FP32) {
#pragma unroll
    for (int s = 0; s < 2; ++s)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        a.x[s][i] =
            load_shared_float(tile.offset_by_odd(from, k + 8 * s, row + 8 * (i % 2), i / 2));
  } else {
    ldmatrix_x4_trans(a.r, tile.offset_by(from, k, row));
  }
  return a;
}
// B, stored [column][k].
template <int kDtype, int kDim>
TEA_DEVICE FragmentB<kDtype> load_b(const SharedTile<kDtype, kDim>& tile, int column, int k,
                                    int l = lane()) {
  FragmentB<kDtype> b;
  if constexpr (kDtype == TEA_FP32) {
    const uint32_t from = lane_address(tile, l);
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        const float2 x = load_shared_float2(tile.offset_by(from, column + 8 * n, k + 8 * s));
        b.x[n][s][0] = x.x, b.x[n][s][1] = x.y;
      }
  } else {
    ldmatrix_x4(b.r, tile.offset_by(lane_address_transposed(tile, l), column, k));
  }
  return b;
}
// B, stored [k][column].
template <int kDtype, int kDim>
TEA_DEVICE FragmentB<kDtype> load_b_transposed(const SharedTile<kDtype, kDim>& tile, int column,
                                               int k, int l = lane()) {
  FragmentB<kDtype> b;
  if constexpr (kDtype == TEA_FP32) {
    const uint32_t from = lane_address_transposed(tile, l);
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int s = 0; s < 2; ++s)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          b.x[n][s][i] = load_shared_float(tile.offset_by_odd(from, k + 8 * s, column + 8 * n, i));
  } else {
    ldmatrix_x4_trans(b.r, tile.offset_by(lane_address(tile, l), k, column));
  }
  return b;
}

// x = high + low, both of 11 significant bits, except for the rest.
struct Tf32Pair {
  uint32_t high, low;
  TEA_DEVICE explicit Tf32Pair(float x) : high(round_tf32(x)) {
    low = round_tf32(x - __uint_as_float(high));
  }
};

// 16 rows by 16 columns: c0 (columns 0 to 7) and c1 (columns 8 to 15) += a b.
template <int kDtype>
TEA_DEVICE void mma(float (&c0)[4], float (&c1)[4], const FragmentA<kDtype>& a,
                    const FragmentB<kDtype>& b) {
  if constexpr (kDtype == TEA_FP32) {
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      uint32_t high[4], low[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const Tf32Pair x(a.x[s][i]);
        high[i] = x.high, low[i] = x.low;
      }
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        float(&c)[4] = n ? c1 : c0;
        const Tf32Pair b0(b.x[n][s][0]), b1(b.x[n][s][1]);
        mma_m16n8k8_tf32(c, low, b0.high, b1.high);
        mma_m16n8k8_tf32(c, high, b0.low, b1.low);
        mma_m16n8k8_tf32(c, high, b0.high, b1.high);
      }
    }
  } else {
    mma_m16n8k16<kDtype == TEA_BF16>(c0, a.r, b.r[0], b.r[1]);
    mma_m16n8k16<kDtype == TEA_BF16>(c1, a.r, b.r[2], b.r[3]);
  }
}

// Whether k is the contiguous dimension of an operand's tile, or the operand's rows or columns.
enum class Major { kK, kMn };

// c += a b over 16 kSteps of k: rows from `row` of a, columns from `column` of b.
template <int kDtype, int kSteps, Major kMajorA, Major kMajorB, int kRows16, int kTiles, class A,
          class B>
TEA_DEVICE void gemm(float (&c)[kRows16][kTiles][4], const A& a, int row, const B& b, int column) {
  const int l = opaque_thread(lane());
  const auto from_a = offset_of<kMajorA == Major::kK>(a, row);
  const auto from_b = offset_of<kMajorB == Major::kK>(b, column);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    FragmentA<kDtype> fragment_a[kRows16];
#pragma unroll
    for (int m = 0; m < kRows16; ++m)
      fragment_a[m] = kMajorA == Major::kK
                          ? load_a(from_a.tile, from_a.first + 16 * m, 16 * step, l)
                          : load_a_transposed(from_a.tile, from_a.first + 16 * m, 16 * step, l);
#pragma unroll
    for (int n = 0; n < kTiles / 2; ++n) {
      const FragmentB<kDtype> fragment_b =
          kMajorB == Major::kK
              ? load_b(from_b.tile, from_b.first + 16 * n, 16 * step, l)
              : load_b_transposed(from_b.tile, from_b.first + 16 * n, 16 * step, l);
#pragma unroll
      for (int m = 0; m < kRows16; ++m)
        mma<kDtype>(c[m][2 * n], c[m][2 * n + 1], fragment_a[m], fragment_b);
    }
  }
}

// The accumulators of columns 16s.. and 16s + 8.. as a fragment of A with those columns as k.
template <int kDtype>
TEA_DEVICE FragmentA<kDtype> accumulator_as_a(const float (&c0)[4], const float (&c1)[4]) {
  FragmentA<kDtype> a;
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
