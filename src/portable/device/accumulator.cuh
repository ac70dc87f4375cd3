// The register layout of an mma accumulator, 16 rows by 8 kTiles columns: float[kTiles][4], of
// which element i of tile n is row accumulator_row(i) and column accumulator_column(n, i). A thread
// holds elements of two rows that are eight apart; the four threads of a quad share a row.
#pragma once
#include "gpu/warp.cuh"

namespace tea::portable {

// Which of the thread's two rows holds element i of a tile.
__host__ __device__ constexpr int row_slot(int i) { return i / 2; }
TEA_DEVICE int accumulator_row(int i) { return lane() / 4 + 8 * row_slot(i); }
TEA_DEVICE int accumulator_column(int n, int i) { return 8 * n + lane() % 4 * 2 + i % 2; }

}  // namespace tea::portable
