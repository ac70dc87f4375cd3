// Boxes of rows that tensor maps load and store.
//
// A box that ends past the last row of a sequence would also load rows of the next sequence,
// which may hold NaN. Tensor maps therefore have two dimensions over rows with the same stride: y,
// as long as the box is high, and z, over all rows; the map starts `height` rows before the tensor.
// A box of n valid rows from row r on starts at y = height - n, z = r + n, which is the address of
// row r: its first n rows lie within y, the others lie beyond the end of y and read as zeros. No
// memory may exist before the tensor, and TMA accesses the start of the map for a box without any
// valid element. Such boxes are therefore never loaded or stored: neither for warpgroups without
// rows nor for slabs beyond the head dimension, which are zeroed once if a product reads them.
#pragma once
#include "gpu/ptx.cuh"

namespace tea::hopper {

// The coordinates of a box of `height` rows with `count` valid rows from row `row` on.
struct RowBox {
  int y, z, head, batch;
  TEA_DEVICE RowBox(int height, int row, int count, int head_, int batch_)
      : head(head_), batch(batch_) {
    const int n = max(0, min(count, height));
    y = height - n;
    z = row + n;
  }
};

}  // namespace tea::hopper
