// Rows of a tensor: moved as bytes for any element type, or loaded as doubles for arithmetic.
#pragma once
#include <cstdint>

#include "math/host_device.h"
#include "ops/moves.h"
#include "te_attention_ops.h"

namespace tea {

// [batch, seq, heads, bytes of a head], with strides in bytes.
struct Rows {
  char* data;
  tea_strides stride;
  int64_t heads, head_bytes;

  TEA_HOST_DEVICE char* at(int64_t batch, int64_t seq, int64_t head) const {
    return data + batch * stride.batch + seq * stride.seq + head * stride.head;
  }
};

Rows rows_of(const void* data, const tea_strides& elements, int64_t heads, int64_t dim,
             int element_bytes);

// Sets the runs of a row of two tensors with equal heads and head_bytes: one run if the heads are
// contiguous, else one per head. Sets `bytes` and `alignment`, and `moves` to the runs of a row.
void set_runs(Moves& moves, const Rows& a, const Rows& b);

// Loads `count` elements from index `first`, with one dispatch on the dtype.
void load_row(const void* data, int32_t dtype, int64_t first, int64_t count, double* out);
void store_row(void* data, int32_t dtype, int64_t first, int64_t count, const double* in);
// The value after a store and a load.
double rounded_to(int32_t dtype, double value);

}  // namespace tea
