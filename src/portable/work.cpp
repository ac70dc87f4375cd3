// Fills Work from Problem and Run. Host code only: no CUDA header is needed.
#include "portable/work.h"

#include <algorithm>
#include <cstring>

#include "math/dropout.h"
#include "math/load_store.h"

namespace tea::portable {
namespace {

// Pointer and strides all multiples of what eight elements need, 16 bytes at most.
bool is_wide(const void* data, const tea_strides& s, int64_t element) {
  const auto piece = static_cast<uint64_t>(std::min<int64_t>(16, 8 * element));
  const auto fits = [&](int64_t stride) {
    return static_cast<uint64_t>(stride) * static_cast<uint64_t>(element) % piece == 0;
  };
  return reinterpret_cast<uintptr_t>(data) % piece == 0 && fits(s.batch) && fits(s.seq) &&
         fits(s.head);
}

struct Maker {
  const Problem& p;
  const Run& run;
  const Geometry& size = run.size;

  Rows rows(tea_tensor t, const tea_strides& s) const {
    const TensorInfo& info = tensor_info(t);
    void* const data = run.tensor[t];
    return {data, s.batch, s.seq, s.head, info.dtype(p), is_wide(data, s, info.element_bytes(p))};
  }

  Side queries() const {
    const bool ragged = p.q_form == TEA_RAGGED;
    return {p.q_form == TEA_DENSE ? nullptr : run.as<const int32_t>(TEA_CU_SEQLENS_Q),
            ragged && p.gaps ? run.as<const int32_t>(TEA_OFFSETS_Q) : nullptr,
            size.max_q,
            size.tokens_q,
            p.q_form,
            0};
  }
  Side keys() const {
    const bool ragged = p.kv_form == TEA_RAGGED;
    return {p.kv_form == TEA_DENSE ? nullptr : run.as<const int32_t>(TEA_CU_SEQLENS_KV),
            ragged && p.gaps ? run.as<const int32_t>(TEA_OFFSETS_KV) : nullptr,
            size.max_kv,
            size.tokens_kv,
            p.kv_form,
            p.page_size};
  }

  PageTable table_k() const {
    if (p.kv_form != TEA_PAGED) return {};
    return {run.as<const int32_t>(TEA_TABLE_K), size.table_k, size.pages_k};
  }
  PageTable table_v() const {
    if (p.kv_form != TEA_PAGED || !run.tensor[TEA_TABLE_V]) {
      PageTable same = table_k();
      same.pages = size.pages_v;
      return same;
    }
    return {run.as<const int32_t>(TEA_TABLE_V), size.table_v, size.pages_v};
  }

  PerRow per_row() const {
    return {p.writes_lse() ? run.as<float>(TEA_LSE) : nullptr,
            p.outputs & TEA_OUTPUT_MAX ? run.as<float>(TEA_MAX) : nullptr,
            p.outputs & TEA_OUTPUT_SUM_EXP ? run.as<float>(TEA_SUM_EXP) : nullptr,
            p.lse_gradient ? run.as<const float>(TEA_DLSE) : nullptr,
            size.lse.batch,
            size.lse.seq,
            size.lse.head};
  }

  Bias bias() const {
    if (!p.bias) return {};
    return {run.tensor[TEA_BIAS], run.tensor[TEA_DBIAS], size.bias,
            size.dbias,           p.bias_type(),         p.bias,
            p.bias_broadcast};
  }

  Scales scales() const {
    if (!p.is_fp8()) return {};
    return {.q_inv = run.number(TEA_Q_SCALE_INV),
            .k_inv = run.number(TEA_K_SCALE_INV),
            .v_inv = run.number(TEA_V_SCALE_INV),
            .s = run.number(TEA_S_SCALE),
            .s_inv = run.number(TEA_S_SCALE_INV),
            .o = run.number(TEA_O_SCALE),
            .o_inv = run.number(TEA_O_SCALE_INV),
            .dout_inv = run.number(TEA_DOUT_SCALE_INV),
            .dp = run.number(TEA_DP_SCALE),
            .dp_inv = run.number(TEA_DP_SCALE_INV),
            .dq = run.number(TEA_DQ_SCALE),
            .dk = run.number(TEA_DK_SCALE),
            .dv = run.number(TEA_DV_SCALE),
            .s_amax = run.number(TEA_S_AMAX),
            .o_amax = run.number(TEA_O_AMAX),
            .dp_amax = run.number(TEA_DP_AMAX),
            .dq_amax = run.number(TEA_DQ_AMAX),
            .dk_amax = run.number(TEA_DK_AMAX),
            .dv_amax = run.number(TEA_DV_AMAX)};
  }

  void fill_tensors(Work& w) const {
    w.q = rows(TEA_Q, size.q), w.k = rows(TEA_K, size.k), w.v = rows(TEA_V, size.v);
    w.o = rows(TEA_O, size.o), w.dout = rows(TEA_DOUT, size.dout);
    w.dq = rows(TEA_DQ, size.dq), w.dk = rows(TEA_DK, size.dk), w.dv = rows(TEA_DV, size.dv);
    w.queries = queries(), w.keys = keys();
    w.table_k = table_k(), w.table_v = table_v();
    w.per_row = per_row(), w.bias = bias(), w.scales = scales();
    w.sink = p.softmax == TEA_SOFTMAX_LEARNABLE ? run.as<const float>(TEA_SINK) : nullptr;
    w.dsink = run.as<float>(TEA_DSINK);
    w.slopes = p.alibi == TEA_ALIBI_SLOPES ? run.as<const float>(TEA_SLOPES) : nullptr;
    w.slopes_stride = size.slopes;
    w.rng = p.drops() ? run.as<const int64_t>(TEA_RNG_STATE) : nullptr;
  }

  void fill_rules(Work& w) const {
    const bool dense = p.q_form == TEA_DENSE && p.kv_form == TEA_DENSE;
    w.mask = p.mask();
    w.equal = dense && !run.origin_device;
    if (w.equal)
      w.every = make_item(w.mask, 0, dense_sequence(size.max_q), dense_sequence(size.max_kv),
                          run.origin[2], run.origin[3]);
    w.batch = dense && size.max_q == 0 && size.max_kv == 0 ? 0 : size.batch;
    w.heads_q = p.heads_q, w.heads_kv = p.heads_kv, w.dim_qk = p.dim_qk, w.dim_v = p.v_dim();
    w.alibi = p.alibi, w.softmax = p.softmax;
    w.drop_below = p.drops() ? dropout_threshold(p.dropout) : 0;
    w.keep_factor = p.drops() ? static_cast<float>(1 / (1 - double{p.dropout})) : 1.0f;
    w.scale = static_cast<float>(p.scale_value()), w.softcap = p.softcap;
    w.dp_dtype = !p.is_fp8() || is_fp8(p.dout_type()) ? p.dout_type() : +TEA_E5M2;
  }
};

}  // namespace

Work make_work(const Problem& problem, const Run& run) {
  Work w{};
  const Maker make{problem, run};
  make.fill_tensors(w);
  make.fill_rules(w);
  std::memcpy(w.origin, run.origin, sizeof w.origin);
  w.origin_device = run.origin_device, w.status = run.status, w.workspace = run.workspace;
  return w;
}

bool has_plain_scores(const Work& w) {
  return !w.bias.kind && !w.alibi && w.softcap == 0 && !w.rng;
}

}  // namespace tea::portable
