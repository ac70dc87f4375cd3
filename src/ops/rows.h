// Rows of a tensor: copied and zeroed as bytes for any element type, or as doubles for arithmetic.
#pragma once
#include <cstdint>
#include <cstring>

#include "te_attention_ops.h"

namespace tea {

// [batch, seq, heads, bytes of a head], reached through strides that are counted in bytes here.
struct Rows {
  char* data;
  tea_strides stride;
  int64_t heads, head_bytes;

  char* row(int64_t batch, int64_t seq) const {
    return data + batch * stride.batch + seq * stride.seq;
  }
};

Rows rows_of(const void* data, const tea_strides& elements, int64_t heads, int64_t dim,
             int element_bytes);
// The tensors are of equal heads and head_bytes.
void copy_row(const Rows& to, char* to_row, const Rows& from, const char* from_row);
void zero_row(const Rows& rows, char* row);

// `count` elements from index `first` on; the dtype is looked at once.
void load_row(const void* data, int32_t dtype, int64_t first, int64_t count, double* out);
void store_row(void* data, int32_t dtype, int64_t first, int64_t count, const double* in);
// The value after a store and a load.
double rounded_to(int32_t dtype, double value);

}  // namespace tea
