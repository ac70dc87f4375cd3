// The kit's table of tensors.
#include "kit/tensors.h"

namespace tea::kit {
namespace {

using P = const Problem&;
using C = const Case&;

struct Row {
  tea_tensor id;
  const char* name;
  Kind kind;
  Written written;
  int32_t (*dtype)(P);
  bool (*used)(C, P);
};

int32_t qkv(P p) { return p.dtype; }
int32_t kv(P p) { return p.kv_dtype ? p.kv_dtype : p.dtype; }
int32_t o(P p) { return p.o_dtype ? p.o_dtype : p.dtype; }
int32_t dout(P p) { return p.dout_dtype ? p.dout_dtype : o(p); }
int32_t dqkv(P p) { return p.dqkv_dtype ? p.dqkv_dtype : p.dtype; }
int32_t bias(P p) { return p.bias_dtype ? p.bias_dtype : is_fp8(p.dtype) ? +TEA_FP32 : p.dtype; }
int32_t fp32(P) { return TEA_FP32; }
int32_t statistic(P p) { return p.dtype == TEA_FP64 ? +TEA_FP64 : +TEA_FP32; }
int32_t integer(P) { return 0; }

bool fp8(P p) { return is_fp8(p.dtype); }
bool shared(C c, P p) { return fp8(p) && c.scales != Scales::kNone; }
bool own(C c, P p) { return fp8(p) && c.scales == Scales::kOwn; }
// Keys and values alone in FP8; both scales, or that of K without that of V.
bool cached(P p) { return is_fp8(p.kv_dtype); }
bool k_scale(C c, P p) { return own(c, p) || (cached(p) && c.scales != Scales::kNone); }
bool v_scale(C c, P p) { return own(c, p) || (cached(p) && c.scales == Scales::kOwn); }
bool always(C, P) { return true; }
bool training(C, P p) { return p.training; }
bool lse(C, P p) { return p.training || (p.outputs & TEA_OUTPUT_LSE); }
bool ragged_q(C, P p) { return p.gaps && p.q_form == TEA_RAGGED; }
bool ragged_kv(C, P p) { return p.gaps && p.kv_form == TEA_RAGGED; }
bool paged(C, P p) { return p.kv_form == TEA_PAGED; }
bool fp8_o(C c, P p) { return shared(c, p) && is_fp8(o(p)); }
bool fp8_do(C c, P p) { return shared(c, p) && p.training && is_fp8(dout(p)); }
bool fp8_training(C c, P p) { return shared(c, p) && p.training; }
bool fp8_own_training(C c, P p) { return own(c, p) && p.training; }
bool fp8_dqkv(C c, P p) { return fp8_training(c, p) && is_fp8(dqkv(p)); }
bool fp8_own_dqkv(C c, P p) { return fp8_own_training(c, p) && is_fp8(dqkv(p)); }

constexpr auto kNever = Written::kNever, kForward = Written::kForward,
               kBackward = Written::kBackward;
constexpr auto kFlat = Kind::kFlat, kInteger = Kind::kInteger;
constexpr Row kRows[] = {
    {TEA_Q, "Q", Kind::kRowsQ, kNever, qkv, always},
    {TEA_K, "K", Kind::kRowsKv, kNever, kv, always},
    {TEA_V, "V", Kind::kRowsKv, kNever, kv, always},
    {TEA_O, "O", Kind::kRowsQ, kForward, o, always},
    {TEA_LSE, "LSE", Kind::kLse, kForward, statistic, lse},
    {TEA_MAX, "MAX", Kind::kLse, kForward, statistic,
     [](C, P p) { return (p.outputs & TEA_OUTPUT_MAX) != 0; }},
    {TEA_SUM_EXP, "SUM_EXP", Kind::kLse, kForward, statistic,
     [](C, P p) { return (p.outputs & TEA_OUTPUT_SUM_EXP) != 0; }},
    {TEA_BIAS, "bias", Kind::kBias, kNever, bias, [](C, P p) { return p.bias != 0; }},
    {TEA_SINK, "sink", kFlat, kNever, statistic,
     [](C, P p) { return p.softmax == TEA_SOFTMAX_LEARNABLE; }},
    {TEA_SLOPES, "slopes", kFlat, kNever, statistic,
     [](C, P p) { return p.alibi == TEA_ALIBI_SLOPES; }},
    {TEA_CU_SEQLENS_Q, "cu_seqlens_q", kInteger, kNever, integer,
     [](C, P p) { return p.q_form != TEA_DENSE; }},
    {TEA_CU_SEQLENS_KV, "cu_seqlens_kv", kInteger, kNever, integer,
     [](C, P p) { return p.kv_form != TEA_DENSE; }},
    {TEA_OFFSETS_Q, "offsets_q", kInteger, kNever, integer, ragged_q},
    {TEA_OFFSETS_KV, "offsets_kv", kInteger, kNever, integer, ragged_kv},
    {TEA_TABLE_K, "table_k", kInteger, kNever, integer, paged},
    {TEA_TABLE_V, "table_v", kInteger, kNever, integer,
     [](C c, P p) { return paged(c, p) && !c.one_table; }},
    {TEA_RNG_STATE, "rng_state", kInteger, kNever, integer,
     [](C, P p) { return p.training && p.dropout > 0; }},
    {TEA_DOUT, "dO", Kind::kRowsQ, kNever, dout, training},
    {TEA_DQ, "dQ", Kind::kRowsQ, kBackward, dqkv, training},
    {TEA_DK, "dK", Kind::kRowsKv, kBackward, dqkv, training},
    {TEA_DV, "dV", Kind::kRowsKv, kBackward, dqkv, training},
    {TEA_DBIAS, "dbias", Kind::kBias, kBackward, bias,
     [](C c, P p) { return p.bias && p.training && !c.omit_optional; }},
    {TEA_DSINK, "dsink", kFlat, kBackward, statistic,
     [](C c, P p) { return p.softmax && p.training && !c.omit_optional; }},
    {TEA_DLSE, "dLSE", Kind::kLse, kNever, statistic,
     [](C, P p) { return p.training && p.lse_gradient; }},
    {TEA_Q_SCALE_INV, "q_scale_inv", kFlat, kNever, fp32, shared},
    {TEA_K_SCALE_INV, "k_scale_inv", kFlat, kNever, fp32, k_scale},
    {TEA_V_SCALE_INV, "v_scale_inv", kFlat, kNever, fp32, v_scale},
    {TEA_S_SCALE, "s_scale", kFlat, kNever, fp32, shared},
    {TEA_S_SCALE_INV, "s_scale_inv", kFlat, kNever, fp32, shared},
    {TEA_S_AMAX, "s_amax", kFlat, kForward, fp32, shared},
    {TEA_O_SCALE, "o_scale", kFlat, kNever, fp32, fp8_o},
    {TEA_O_SCALE_INV, "o_scale_inv", kFlat, kNever, fp32,
     [](C c, P p) { return fp8_o(c, p) && p.training; }},
    {TEA_O_AMAX, "o_amax", kFlat, kForward, fp32, shared},
    {TEA_DOUT_SCALE_INV, "do_scale_inv", kFlat, kNever, fp32, fp8_do},
    {TEA_DP_SCALE, "dp_scale", kFlat, kNever, fp32, fp8_training},
    {TEA_DP_SCALE_INV, "dp_scale_inv", kFlat, kNever, fp32, fp8_training},
    {TEA_DP_AMAX, "dp_amax", kFlat, kBackward, fp32, fp8_training},
    {TEA_DQ_SCALE, "dq_scale", kFlat, kNever, fp32, fp8_dqkv},
    {TEA_DK_SCALE, "dk_scale", kFlat, kNever, fp32, fp8_own_dqkv},
    {TEA_DV_SCALE, "dv_scale", kFlat, kNever, fp32, fp8_own_dqkv},
    {TEA_DQ_AMAX, "dq_amax", kFlat, kBackward, fp32, fp8_training},
    {TEA_DK_AMAX, "dk_amax", kFlat, kBackward, fp32, fp8_own_training},
    {TEA_DV_AMAX, "dv_amax", kFlat, kBackward, fp32, fp8_own_training},
};
static_assert(std::size(kRows) == TEA_TENSOR_COUNT, "a row for every tensor");

const tea_strides& given_strides(P p, tea_tensor t) {
  switch (t) {
    case TEA_Q:
      return p.q;
    case TEA_K:
      return p.k;
    case TEA_V:
      return p.v;
    case TEA_O:
      return p.o;
    case TEA_DOUT:
      return p.dout;
    case TEA_DQ:
      return p.dq;
    case TEA_DK:
      return p.dk;
    default:
      return p.dv;
  }
}

bool has_value_dim(tea_tensor t) {
  return t == TEA_V || t == TEA_O || t == TEA_DOUT || t == TEA_DV;
}

void shape_rows(Place& place, P p, const Extents& e) {
  const bool query = place.kind != Kind::kRowsKv;
  const int64_t dim = has_value_dim(place.id) ? p.v_dim() : p.dim_qk;
  const int32_t form = query ? p.q_form : p.kv_form;
  const int64_t heads = query ? p.heads_q : p.heads_kv;
  tea_strides s;
  if (place.kind == Kind::kLse)
    s = resolved_lse(p, e);
  else
    s = resolved(p, e, given_strides(p, place.id), query, dim);
  if (form == TEA_RAGGED)
    place.shape = {1, query ? e.tokens_q : e.tokens_kv, heads, dim};
  else if (form == TEA_PAGED)
    place.shape = {e.pages, p.page_size, heads, dim};
  else
    place.shape = {e.batch, query ? e.max_q : e.max_kv, heads, dim};
  if (place.kind == Kind::kLse) place.shape[3] = 1;
  place.stride = {s.batch, s.seq, s.head, 1};
}

void shape_bias(Place& place, P p, const Extents& e) {
  const tea_bias_strides s =
      resolved_bias(p, e, place.id == TEA_BIAS ? p.bias_stride : p.dbias_stride);
  place.shape = {e.batch, p.heads_q, e.max_q, e.max_kv};
  for (size_t i = 0; i < 4; ++i)
    if (p.bias_broadcast >> i & 1) place.shape[i] = 1;
  place.stride = {s.batch, s.head, s.row, s.col};
}

// Vectors and integers are one row of elements.
void shape_flat(Place& place, P p, const Extents& e) {
  int64_t n = 1;
  switch (place.id) {
    case TEA_SINK:
    case TEA_DSINK:
      n = p.heads_q;
      break;
    case TEA_SLOPES:
      n = p.slopes_stride ? std::max<int64_t>(e.batch - 1, 0) * p.slopes_stride + p.heads_q
                          : p.heads_q;
      break;
    case TEA_TABLE_K:
      n = e.batch * (p.table_k_stride ? p.table_k_stride : e.table_pages);
      break;
    case TEA_TABLE_V:
      n = e.batch * (p.table_v_stride ? p.table_v_stride : e.table_pages);
      break;
    case TEA_K_SCALE_INV:
    case TEA_V_SCALE_INV:
      n = p.kv_scale == TEA_KV_SCALE_HEAD ? p.heads_kv : 1;
      break;
    case TEA_RNG_STATE:
      n = 2;
      break;
    default:
      if (place.kind == Kind::kInteger) n = e.batch + 1;
  }
  place.shape = {1, 1, 1, n};
  place.stride = {0, 0, 0, 1};
}

}  // namespace

bool is_fp8(int32_t dtype) { return dtype == TEA_E4M3 || dtype == TEA_E5M2; }
const char* tensor_name(tea_tensor t) { return kRows[t].name; }

int64_t Place::span() const {
  if (elements() == 0) return 0;
  int64_t last = 0;
  for (size_t i = 0; i < 4; ++i) last += (shape[i] - 1) * stride[i];
  return last + 1;
}

std::array<Place, TEA_TENSOR_COUNT> places(const Case& c, const Problem& p, const Extents& e) {
  std::array<Place, TEA_TENSOR_COUNT> out;
  for (const Row& row : kRows) {
    Place& place = out[row.id];
    place.id = row.id, place.kind = row.kind, place.written = row.written;
    place.used = row.used(c, p);
    place.dtype = row.dtype(p);
    if (row.kind == Kind::kBias)
      shape_bias(place, p, e);
    else if (row.kind == Kind::kFlat || row.kind == Kind::kInteger)
      shape_flat(place, p, e);
    else
      shape_rows(place, p, e);
  }
  return out;
}

int64_t element(const Place& place, const Problem& p, const Extents& e, const Index& at) {
  const auto [b, h, row, col] = at;
  const Index& s = place.stride;
  if (place.kind == Kind::kBias) return b * s[0] + h * s[1] + row * s[2] + col * s[3];
  const bool query = place.kind != Kind::kRowsKv;
  const int32_t form = query ? p.q_form : p.kv_form;
  const auto i = static_cast<size_t>(b);
  if (form == TEA_RAGGED)
    return ((query ? e.start_q : e.start_kv)[i] + row) * s[1] + h * s[2] + col;
  if (form == TEA_PAGED) {
    const std::vector<int32_t>& table = place.id == TEA_K ? e.table_k : e.table_v;
    const int64_t page = table[static_cast<size_t>(b * e.table_pages + row / p.page_size)];
    return page * s[0] + row % p.page_size * s[1] + h * s[2] + col;
  }
  return b * s[0] + row * s[1] + h * s[2] + col;
}

}  // namespace tea::kit
