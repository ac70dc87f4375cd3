// The table of tensors: the use, type and shape of each.
#include "core/tensors.h"

namespace tea {
namespace {

using P = const Problem&;

Use need(bool used) { return used ? Use::kRequired : Use::kUnused; }
Use may(bool used) { return used ? Use::kOptional : Use::kUnused; }

Use never(P) { return Use::kUnused; }
Use always(P) { return Use::kRequired; }
Use training(P p) { return need(p.training); }
Use lse(P p) { return need(p.writes_lse()); }
Use max(P p) { return need(p.outputs & TEA_OUTPUT_MAX); }
Use sum_exp(P p) { return need(p.outputs & TEA_OUTPUT_SUM_EXP); }
Use bias(P p) { return need(p.bias); }
Use bias_training(P p) { return need(p.bias && p.training); }
Use dbias(P p) { return may(p.bias && p.training); }
Use sink(P p) { return need(p.softmax == TEA_SOFTMAX_LEARNABLE); }
Use sink_backward(P p) { return may(p.softmax == TEA_SOFTMAX_LEARNABLE); }
Use dsink(P p) { return may(p.softmax != TEA_SOFTMAX_VANILLA && p.training); }
Use slopes(P p) { return need(p.alibi == TEA_ALIBI_SLOPES); }
Use cu_q(P p) { return need(p.q_form != TEA_DENSE); }
Use cu_kv(P p) { return need(p.kv_form != TEA_DENSE); }
Use offsets_q(P p) { return need(p.gaps && p.q_form == TEA_RAGGED); }
Use offsets_kv(P p) { return need(p.gaps && p.kv_form == TEA_RAGGED); }
Use table_k(P p) { return need(p.kv_form == TEA_PAGED); }
Use table_v(P p) { return may(p.kv_form == TEA_PAGED); }
Use rng(P p) { return need(p.drops()); }
Use dlse(P p) { return need(p.lse_gradient); }

Use fp8(P p) { return may(p.is_fp8()); }
Use fp8_kv(P p) { return may(is_fp8(p.kv_type())); }
Use fp8_training(P p) { return may(p.is_fp8() && p.training); }
Use fp8_o(P p) { return may(is_fp8(p.o_type())); }
Use fp8_o_training(P p) { return may(is_fp8(p.o_type()) && p.training); }
Use fp8_dout(P p) { return may(is_fp8(p.dout_type()) && p.training); }
Use fp8_dqkv(P p) { return may(is_fp8(p.dqkv_type()) && p.training); }

struct Rows {
  int32_t form;
  int64_t batch, rows, tokens, pages, page_size;
};

Shape strided(const Rows& r, int64_t heads, int64_t dim, const tea_strides& s) {
  switch (r.form) {
    case TEA_RAGGED:
      return {3, {r.tokens, heads, dim}, {s.seq, s.head, 1}};
    case TEA_PAGED:
      return {4, {r.pages, r.page_size, heads, dim}, {s.batch, s.seq, s.head, 1}};
    default:
      return {4, {r.batch, r.rows, heads, dim}, {s.batch, s.seq, s.head, 1}};
  }
}
Rows rows_q(P p, const Geometry& g) { return {p.q_form, g.batch, g.max_q, g.tokens_q, 0, 0}; }
Rows rows_kv(P p, const Geometry& g, int64_t pages) {
  return {p.kv_form, g.batch, g.max_kv, g.tokens_kv, pages, p.page_size};
}

template <tea_strides Geometry::*S>
Shape on_q(P p, const Geometry& g) {
  return strided(rows_q(p, g), p.heads_q, p.dim_qk, g.*S);
}
template <tea_strides Geometry::*S>
Shape on_o(P p, const Geometry& g) {
  return strided(rows_q(p, g), p.heads_q, p.v_dim(), g.*S);
}
template <tea_strides Geometry::*S>
Shape on_k(P p, const Geometry& g) {
  return strided(rows_kv(p, g, g.pages_k), p.heads_kv, p.dim_qk, g.*S);
}
template <tea_strides Geometry::*S>
Shape on_v(P p, const Geometry& g) {
  return strided(rows_kv(p, g, g.pages_v), p.heads_kv, p.v_dim(), g.*S);
}
Shape on_lse(P p, const Geometry& g) {
  if (p.q_form == TEA_RAGGED) return {2, {g.tokens_q, p.heads_q}, {g.lse.seq, g.lse.head}};
  return {3, {g.batch, p.heads_q, g.max_q}, {g.lse.batch, g.lse.head, g.lse.seq}};
}
template <tea_bias_strides Geometry::*S>
Shape on_bias(P p, const Geometry& g) {
  const auto size = [&](int bit, int64_t n) { return p.bias_broadcast & bit ? 1 : n; };
  const tea_bias_strides& s = g.*S;
  return {4,
          {size(TEA_BROADCAST_BATCH, g.batch), size(TEA_BROADCAST_HEAD, p.heads_q),
           size(TEA_BROADCAST_ROW, g.max_q), size(TEA_BROADCAST_COL, g.max_kv)},
          {s.batch, s.head, s.row, s.col}};
}
Shape heads(P p, const Geometry&) { return {1, {p.heads_q}, {1}}; }
Shape on_slopes(P p, const Geometry& g) {
  return {2, {g.slopes ? g.batch : 1, p.heads_q}, {g.slopes, 1}};
}
Shape lengths(P, const Geometry& g) { return {1, {g.batch + 1}, {1}}; }
Shape on_table_k(P, const Geometry& g) { return {2, {g.batch, g.table_pages}, {g.table_k, 1}}; }
Shape on_table_v(P, const Geometry& g) { return {2, {g.batch, g.table_pages}, {g.table_v, 1}}; }
Shape kv_scales(P p, const Geometry&) { return {1, {p.kv_scale ? p.heads_kv : 1}, {1}}; }
Shape pair(P, const Geometry&) { return {1, {2}, {1}}; }
Shape scalar(P, const Geometry&) { return {1, {1}, {1}}; }

using G = Geometry;
constexpr bool kIn = false, kOut = true;
// FP8 scalars: index, name, use in forward, use in backward, written by forward, by backward.
#define SCALAR(id, text, fwd, bwd, out_fwd, out_bwd) \
  { TEA_##id, text, Type::kFp32, fwd, bwd, out_fwd, out_bwd, scalar }
constexpr TensorInfo kTensors[] = {
    {TEA_Q, "Q", Type::kQ, always, training, kIn, kIn, on_q<&G::q>},
    {TEA_K, "K", Type::kKv, always, training, kIn, kIn, on_k<&G::k>},
    {TEA_V, "V", Type::kKv, always, training, kIn, kIn, on_v<&G::v>},
    {TEA_O, "O", Type::kO, always, training, kOut, kIn, on_o<&G::o>},
    {TEA_LSE, "LSE", Type::kStatistic, lse, training, kOut, kIn, on_lse},
    {TEA_MAX, "MAX", Type::kStatistic, max, never, kOut, kIn, on_lse},
    {TEA_SUM_EXP, "SUM_EXP", Type::kStatistic, sum_exp, never, kOut, kIn, on_lse},
    {TEA_BIAS, "bias", Type::kBias, bias, bias_training, kIn, kIn, on_bias<&G::bias>},
    {TEA_SINK, "sink", Type::kStatistic, sink, sink_backward, kIn, kIn, heads},
    {TEA_SLOPES, "slopes", Type::kStatistic, slopes, slopes, kIn, kIn, on_slopes},
    {TEA_CU_SEQLENS_Q, "cu_seqlens_q", Type::kInt32, cu_q, cu_q, kIn, kIn, lengths},
    {TEA_CU_SEQLENS_KV, "cu_seqlens_kv", Type::kInt32, cu_kv, cu_kv, kIn, kIn, lengths},
    {TEA_OFFSETS_Q, "offsets_q", Type::kInt32, offsets_q, offsets_q, kIn, kIn, lengths},
    {TEA_OFFSETS_KV, "offsets_kv", Type::kInt32, offsets_kv, offsets_kv, kIn, kIn, lengths},
    {TEA_TABLE_K, "table_k", Type::kInt32, table_k, never, kIn, kIn, on_table_k},
    {TEA_TABLE_V, "table_v", Type::kInt32, table_v, never, kIn, kIn, on_table_v},
    {TEA_RNG_STATE, "rng_state", Type::kInt64, rng, rng, kIn, kIn, pair},
    {TEA_DOUT, "dO", Type::kDout, never, training, kIn, kIn, on_o<&G::dout>},
    {TEA_DQ, "dQ", Type::kDqkv, never, training, kIn, kOut, on_q<&G::dq>},
    {TEA_DK, "dK", Type::kDqkv, never, training, kIn, kOut, on_k<&G::dk>},
    {TEA_DV, "dV", Type::kDqkv, never, training, kIn, kOut, on_v<&G::dv>},
    {TEA_DBIAS, "dbias", Type::kBias, never, dbias, kIn, kOut, on_bias<&G::dbias>},
    {TEA_DSINK, "dsink", Type::kStatistic, never, dsink, kIn, kOut, heads},
    {TEA_DLSE, "dLSE", Type::kStatistic, never, dlse, kIn, kIn, on_lse},
    SCALAR(Q_SCALE_INV, "q_scale_inv", fp8, fp8_training, kIn, kIn),
    {TEA_K_SCALE_INV, "k_scale_inv", Type::kFp32, fp8_kv, fp8_training, kIn, kIn, kv_scales},
    {TEA_V_SCALE_INV, "v_scale_inv", Type::kFp32, fp8_kv, fp8_training, kIn, kIn, kv_scales},
    SCALAR(S_SCALE, "s_scale", fp8, fp8_training, kIn, kIn),
    SCALAR(S_SCALE_INV, "s_scale_inv", fp8, fp8_training, kIn, kIn),
    SCALAR(S_AMAX, "s_amax", fp8, never, kOut, kIn),
    SCALAR(O_SCALE, "o_scale", fp8_o, never, kIn, kIn),
    SCALAR(O_SCALE_INV, "o_scale_inv", never, fp8_o_training, kIn, kIn),
    SCALAR(O_AMAX, "o_amax", fp8, never, kOut, kIn),
    SCALAR(DOUT_SCALE_INV, "do_scale_inv", never, fp8_dout, kIn, kIn),
    SCALAR(DP_SCALE, "dp_scale", never, fp8_training, kIn, kIn),
    SCALAR(DP_SCALE_INV, "dp_scale_inv", never, fp8_training, kIn, kIn),
    SCALAR(DP_AMAX, "dp_amax", never, fp8_training, kIn, kOut),
    SCALAR(DQ_SCALE, "dq_scale", never, fp8_dqkv, kIn, kIn),
    SCALAR(DK_SCALE, "dk_scale", never, fp8_dqkv, kIn, kIn),
    SCALAR(DV_SCALE, "dv_scale", never, fp8_dqkv, kIn, kIn),
    SCALAR(DQ_AMAX, "dq_amax", never, fp8_training, kIn, kOut),
    SCALAR(DK_AMAX, "dk_amax", never, fp8_training, kIn, kOut),
    SCALAR(DV_AMAX, "dv_amax", never, fp8_training, kIn, kOut),
};
#undef SCALAR

constexpr bool in_order() {
  for (int i = 0; i < TEA_TENSOR_COUNT; ++i)
    if (kTensors[i].index != i) return false;
  return std::size(kTensors) == TEA_TENSOR_COUNT;
}
static_assert(in_order(), "kTensors must list every index of tea_tensor, in order");

}  // namespace

int64_t Shape::elements() const {
  int64_t n = 1;
  for (int i = 0; i < rank; ++i)
    if (size[i] == 0) return 0;
  for (int i = 0; i < rank; ++i)
    if (__builtin_mul_overflow(n, size[i], &n)) return INT64_MAX;
  return n;
}

int64_t Shape::span() const {
  if (elements() == 0) return 0;
  int64_t last = 0;
  for (int i = 0; i < rank; ++i) last += (size[i] - 1) * stride[i];
  return last + 1;
}

int32_t TensorInfo::dtype(const Problem& p) const {
  switch (type) {
    case Type::kQ:
      return p.dtype;
    case Type::kKv:
      return p.kv_type();
    case Type::kO:
      return p.o_type();
    case Type::kDout:
      return p.dout_type();
    case Type::kDqkv:
      return p.dqkv_type();
    case Type::kBias:
      return p.bias_type();
    case Type::kStatistic:
      return p.statistic_type();
    case Type::kFp32:
      return TEA_FP32;
    case Type::kInt32:
    case Type::kInt64:
      break;
  }
  return TEA_DTYPE_DEFAULT;
}

int TensorInfo::element_bytes(const Problem& p) const {
  if (type == Type::kInt32) return 4;
  return type == Type::kInt64 ? 8 : dtype_bytes(dtype(p));
}

int64_t Shape::offset(int64_t flat) const {
  int64_t out = 0;
  for (int i = rank - 1; i >= 0; --i) {
    out += flat % size[i] * stride[i];
    flat /= size[i];
  }
  return out;
}

const TensorInfo& tensor_info(tea_tensor index) { return kTensors[index]; }

std::span<const TensorInfo> tensor_table() { return kTensors; }

}  // namespace tea
