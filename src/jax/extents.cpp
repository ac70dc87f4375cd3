#include "jax/extents.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "frontend/tensor.h"

namespace tea::jax {
uint64_t product(uint64_t element, std::initializer_list<int64_t> sizes) {
  uint64_t bytes = element;
  for (const int64_t size : sizes)
    if (size < 0 || __builtin_mul_overflow(bytes, static_cast<uint64_t>(size), &bytes))
      throw std::runtime_error("sizes is " + std::to_string(size) +
                               " in part; needs sizes from 0 whose product fits in 64 bits");
  return bytes;
}

namespace {
int64_t batch_of(const tea_problem& p, const tea_run& run) {
  const bool open = p.q_form == TEA_RAGGED || p.kv_form == TEA_RAGGED || p.kv_form == TEA_PAGED;
  return open ? run.batch : p.batch;
}
}  // namespace

uint64_t origin_bytes(const tea_problem& p, const tea_run& run) {
  return product(sizeof(int64_t), {batch_of(p, run), kOriginNumbers});
}

namespace {

int32_t or_else(int32_t given, int32_t usual) { return given ? given : usual; }
uint64_t bytes_of_type(int32_t type) { return static_cast<uint64_t>(frontend::type_bytes(type)); }

// The bytes of a tensor of each shape.
struct Extents {
  const tea_problem& p;
  const tea_run& run;
  const int64_t batch = batch_of(p, run);

  uint64_t rows_q(int32_t dtype, int64_t dim) const {
    const uint64_t size = bytes_of_type(dtype);
    return p.q_form == TEA_RAGGED ? product(size, {run.tokens_q, p.heads_q, dim})
                                  : product(size, {batch, p.seqlen_q, p.heads_q, dim});
  }
  uint64_t rows_kv(int32_t dtype, int64_t dim, int64_t pages) const {
    const uint64_t size = bytes_of_type(dtype);
    if (p.kv_form == TEA_RAGGED) return product(size, {run.tokens_kv, p.heads_kv, dim});
    if (p.kv_form == TEA_PAGED) return product(size, {pages, p.page_size, p.heads_kv, dim});
    return product(size, {batch, p.seqlen_kv, p.heads_kv, dim});
  }
  int64_t max_q() const { return p.q_form == TEA_RAGGED ? run.max_q : p.seqlen_q; }
  int64_t max_kv() const {
    return p.kv_form == TEA_RAGGED || p.kv_form == TEA_PAGED ? run.max_kv : p.seqlen_kv;
  }
  uint64_t bias() const {
    const auto size = [&](int bit, int64_t full) { return p.bias_broadcast & bit ? 1 : full; };
    return product(bytes_of_type(or_else(p.bias_dtype, p.dtype)),
                   {size(TEA_BROADCAST_BATCH, batch), size(TEA_BROADCAST_HEAD, p.heads_q),
                    size(TEA_BROADCAST_ROW, max_q()), size(TEA_BROADCAST_COL, max_kv())});
  }
  uint64_t table(int64_t columns) const {
    if (!columns) columns = p.page_size > 0 ? (max_kv() + p.page_size - 1) / p.page_size : 0;
    return product(4, {batch, columns});
  }
};

}  // namespace

uint64_t bytes_of(const tea_problem& p, const tea_run& run, int32_t index) {
  const Extents of{p, run};
  const int32_t o_dtype = or_else(p.o_dtype, p.dtype);
  const int64_t dim_v = or_else(p.dim_v, p.dim_qk);
  const int32_t number = p.dtype == TEA_FP64 ? TEA_FP64 : TEA_FP32;  // LSE, sinks, slopes
  const int32_t gradient = or_else(p.dqkv_dtype, p.dtype);
  switch (index) {
    case TEA_Q:
      return of.rows_q(p.dtype, p.dim_qk);
    case TEA_DQ:
      return of.rows_q(gradient, p.dim_qk);
    case TEA_K:
      return of.rows_kv(p.dtype, p.dim_qk, run.pages_k);
    case TEA_DK:
      return of.rows_kv(gradient, p.dim_qk, run.pages_k);
    case TEA_V:
      return of.rows_kv(p.dtype, dim_v, run.pages_v);
    case TEA_DV:
      return of.rows_kv(gradient, dim_v, run.pages_v);
    case TEA_O:
      return of.rows_q(o_dtype, dim_v);
    case TEA_DOUT:
      return of.rows_q(or_else(p.dout_dtype, o_dtype), dim_v);
    case TEA_LSE:
    case TEA_MAX:
    case TEA_SUM_EXP:
    case TEA_DLSE:
      return of.rows_q(number, 1);
    case TEA_BIAS:
    case TEA_DBIAS:
      return of.bias();
    case TEA_SINK:
    case TEA_DSINK:
      return product(bytes_of_type(number), {p.heads_q});
    case TEA_SLOPES:
      return product(bytes_of_type(number), {p.slopes_stride ? of.batch : 1, p.heads_q});
    case TEA_CU_SEQLENS_Q:
    case TEA_CU_SEQLENS_KV:
    case TEA_OFFSETS_Q:
    case TEA_OFFSETS_KV:
      return product(4, {of.batch, 1}) + 4;
    case TEA_TABLE_K:
      return of.table(p.table_k_stride);
    case TEA_TABLE_V:
      return of.table(p.table_v_stride);
    case TEA_RNG_STATE:
      return 16;
    case kOrigin:
      return kOriginBytes;
    default:
      return 4;  // FP8: one number
  }
}

void require_contiguous(const tea_problem& p) {
  int64_t strides = 0;
  for (const tea_strides& s : {p.q, p.k, p.v, p.o, p.dout, p.dq, p.dk, p.dv, p.lse})
    strides |= s.batch | s.seq | s.head;
  for (const tea_bias_strides& s : {p.bias_stride, p.dbias_stride})
    strides |= s.batch | s.head | s.row | s.col;
  if (strides || (p.slopes_stride && p.slopes_stride != p.heads_q))
    throw std::runtime_error("problem has strides; needs none: arrays of XLA are contiguous");
}

}  // namespace tea::jax
