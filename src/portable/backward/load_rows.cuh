// Loads of rows of a tensor into a tile in shared memory.
#pragma once
#include "portable/arguments.cuh"
#include "portable/device/load_store.cuh"

namespace tea::portable {

// Loads kRows rows of a head, from row `first` and head dimension `begin` on; rows that are not in
// `valid` and dimensions from `dim` on are zero. kAny: of any type and alignment; otherwise the
// tensor must be vectorizable. Copies may still be incomplete afterwards.
template <bool kAny, int kRows, int kThreads, int kDtype, int kDim>
TEA_DEVICE void load_rows(const SharedTile<kDtype, kDim>& tile, const StridedTensor& rows,
                          int64_t head_element, int first, const Columns& valid, int begin,
                          int dim) {
  constexpr int kEighths = kDim / 8, kRowsAtOnce = kThreads / kEighths;
  static_assert(kThreads % kEighths == 0 && kRows % kRowsAtOnce == 0);
  const int thread = opaque_thread(static_cast<int>(threadIdx.x));
  const int skipped =
      first - static_cast<int>(valid.begin);  // rows from the first valid one to the tile
  const auto count = static_cast<unsigned>(max(valid.end - valid.begin, int64_t{0}));
  const auto is_valid = [&](int row, int column) {
    return static_cast<unsigned>(skipped + row) < (begin + column < dim ? count : 0);
  };
  const auto element = [&](int row, int column) {
    return head_element + (first + row) * rows.seq + begin + column;
  };
  if (!kAny || (rows.dtype == kDtype && rows.is_vectorizable)) {
    // A thread loads the same column of each of its rows. Rows that are not valid are not read,
    // wherever the pointer is.
    const int row = thread / kEighths, column = thread % kEighths * 8;
    const char* from =
        static_cast<const char*>(rows.data) + element(row, column) * kElementBytes<kDtype>;
    const int64_t pitch = kRowsAtOnce * rows.seq * kElementBytes<kDtype>;
#pragma unroll
    for (int i = 0; i < kRows; i += kRowsAtOnce, from += pitch)
      cp_async_8_elements(tile, row + i, column, from, is_valid(row + i, column));
  } else {
#pragma unroll 1
    for (int n = thread; n < kRows * kEighths; n += kThreads) {
      const int row = n / kEighths, column = n % kEighths * 8;
      const bool valid_row = is_valid(row, column);
#pragma unroll 1
      for (int j = 0; j < 8; ++j)
        store_element(
            tile, row, column + j,
            valid_row ? load_float(rows.data, rows.dtype, element(row, column) + j) : 0.0f);
    }
  }
}

}  // namespace tea::portable
