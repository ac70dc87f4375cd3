// Tensor maps of Q, K, V, O and their gradients.
#pragma once
#include <algorithm>

#include "gpu/arguments.h"
#include "hopper/tensor_map.h"

namespace tea::hopper {

// Encodes the map of a tensor of `rows` by heads; row_box.cuh explains the two dimensions
// over rows. Returns the driver's code.
inline int encode_rows(TensorMap* to, const void* data, const StridedTensor& x,
                       const SequenceLayout& layout, int dim, int heads, int64_t batch, Type type,
                       Swizzle s, int box_rows) {
  const int64_t rows = layout.form == TEA_RAGGED ? layout.tokens : layout.max_seqlen;
  const int64_t batches = layout.form == TEA_RAGGED ? 1 : batch;
  const auto extent = [](int64_t n) { return static_cast<uint64_t>(std::max<int64_t>(n, 1)); };
  const int element = tea::hopper::bytes(type);
  const auto bytes = [&](int64_t stride) { return static_cast<uint64_t>(stride * element); };
  const MapShape shape = {
      type,
      s,
      5,
      {extent(dim), extent(box_rows), extent(heads), extent(rows + 1), extent(batches)},
      {0, bytes(x.seq), bytes(x.head), bytes(x.seq), bytes(x.batch)},
      {static_cast<uint32_t>(width(s) / element), static_cast<uint32_t>(box_rows), 1, 1, 1}};
  return encode(to, static_cast<const char*>(data) - box_rows * x.seq * element, shape);
}

// The rows of a page of K and V, whose pages are the batch entries of their map.
inline SequenceLayout page_rows(const SequenceLayout& keys) {
  SequenceLayout rows = keys;
  rows.form = TEA_DENSE, rows.max_seqlen = keys.page_size;
  return rows;
}

}  // namespace tea::hopper
