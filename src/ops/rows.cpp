// Rows as bytes and rows as doubles.
#include "ops/rows.h"

#include "math/load_store.h"

namespace tea {
namespace {

template <int32_t dtype>
void load_as(const void* data, int64_t first, int64_t count, double* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = load_real(data, dtype, first + i);
}

template <int32_t dtype>
void store_as(void* data, int64_t first, int64_t count, const double* in) {
  for (int64_t i = 0; i < count; ++i) store_real(data, dtype, first + i, in[i]);
}

struct Access {
  void (*load)(const void*, int64_t, int64_t, double*);
  void (*store)(void*, int64_t, int64_t, const double*);
};
constexpr Access kAccess[] = {
    {nullptr, nullptr},
    {load_as<TEA_FP16>, store_as<TEA_FP16>},
    {load_as<TEA_BF16>, store_as<TEA_BF16>},
    {load_as<TEA_FP32>, store_as<TEA_FP32>},
    {load_as<TEA_FP64>, store_as<TEA_FP64>},
    {load_as<TEA_E4M3>, store_as<TEA_E4M3>},
    {load_as<TEA_E5M2>, store_as<TEA_E5M2>},
};

}  // namespace

Rows rows_of(const void* data, const tea_strides& elements, int64_t heads, int64_t dim,
             int element_bytes) {
  return {
      static_cast<char*>(const_cast<void*>(data)),
      {elements.batch * element_bytes, elements.seq * element_bytes, elements.head * element_bytes},
      heads,
      dim * element_bytes};
}

void set_runs(Moves& moves, const Rows& a, const Rows& b) {
  const bool whole = a.stride.head == a.head_bytes && b.stride.head == b.head_bytes;
  moves.moves = whole ? 1 : a.heads;
  moves.bytes = whole ? a.heads * a.head_bytes : a.head_bytes;
  moves.align(moves.bytes);
  for (const Rows* rows : {&a, &b}) {
    moves.align(rows->data);
    moves.align(rows->stride.batch);
    moves.align(rows->stride.seq);
    if (!whole) moves.align(rows->stride.head);
  }
}

void load_row(const void* data, int32_t dtype, int64_t first, int64_t count, double* out) {
  kAccess[dtype].load(data, first, count, out);
}

void store_row(void* data, int32_t dtype, int64_t first, int64_t count, const double* in) {
  kAccess[dtype].store(data, first, count, in);
}

double rounded_to(int32_t dtype, double value) {
  double cell = 0;  // large enough for any dtype
  store_real(&cell, dtype, 0, value);
  return load_real(&cell, dtype, 0);
}

}  // namespace tea
