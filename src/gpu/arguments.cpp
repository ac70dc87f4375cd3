// Builds the arguments of attention kernels from Problem and Run.
#include "gpu/arguments.h"

#include <algorithm>
#include <cstring>

#include "math/dropout.h"
#include "math/load_store.h"

namespace tea {
namespace {

// Whether the pointer and all strides are multiples of the size of eight elements, or of 16 bytes
// if that is less.
bool is_vectorizable(const void* data, const tea_strides& s, int64_t element) {
  const auto piece = static_cast<uint64_t>(std::min<int64_t>(16, 8 * element));
  const auto fits = [&](int64_t stride) {
    return (static_cast<uint64_t>(stride) * static_cast<uint64_t>(element) & (piece - 1)) == 0;
  };
  return reinterpret_cast<uintptr_t>(data) % piece == 0 && fits(s.batch) && fits(s.seq) &&
         fits(s.head);
}

struct Builder {
  const Problem& p;
  const Run& run;
  const Geometry& size = run.size;

  StridedTensor tensor(tea_tensor t, const tea_strides& s) const {
    const TensorInfo& info = tensor_info(t);
    void* const data = run.tensor[t];
    return {data,   s.batch,       s.seq,
            s.head, info.dtype(p), is_vectorizable(data, s, info.element_bytes(p))};
  }

  SequenceLayout queries() const {
    return {lengths(p.q_form, TEA_CU_SEQLENS_Q),
            offsets(p.q_form, TEA_OFFSETS_Q),
            size.max_q,
            size.tokens_q,
            p.q_form,
            0};
  }
  SequenceLayout keys() const {
    return {lengths(p.kv_form, TEA_CU_SEQLENS_KV),
            offsets(p.kv_form, TEA_OFFSETS_KV),
            size.max_kv,
            size.tokens_kv,
            p.kv_form,
            p.page_size};
  }
  const int32_t* lengths(int32_t form, tea_tensor t) const {
    return form == TEA_DENSE ? nullptr : run.as<const int32_t>(t);
  }
  const int32_t* offsets(int32_t form, tea_tensor t) const {
    return form == TEA_RAGGED && p.gaps ? run.as<const int32_t>(t) : nullptr;
  }

  PageTable page_table_k() const {
    if (p.kv_form != TEA_PAGED) return {};
    return {run.as<const int32_t>(TEA_TABLE_K), size.table_k, size.pages_k};
  }
  PageTable page_table_v() const {
    if (p.kv_form != TEA_PAGED || !run.tensor[TEA_TABLE_V]) {
      PageTable same = page_table_k();
      same.pages = size.pages_v;
      return same;
    }
    return {run.as<const int32_t>(TEA_TABLE_V), size.table_v, size.pages_v};
  }

  RowStatistics statistics() const {
    return {p.writes_lse() ? run.as<float>(TEA_LSE) : nullptr,
            p.outputs & TEA_OUTPUT_MAX ? run.as<float>(TEA_MAX) : nullptr,
            p.outputs & TEA_OUTPUT_SUM_EXP ? run.as<float>(TEA_SUM_EXP) : nullptr,
            p.lse_gradient ? run.as<const float>(TEA_DLSE) : nullptr,
            size.lse.batch,
            size.lse.seq,
            size.lse.head};
  }

  BiasArguments bias() const {
    if (!p.bias) return {};
    return {run.tensor[TEA_BIAS], run.tensor[TEA_DBIAS], size.bias,
            size.dbias,           p.bias_type(),         p.bias,
            p.bias_broadcast};
  }

  Fp8Scales fp8_scales() const {
    if (p.kv_dtype) {
      Fp8Scales cache{};
      cache.k_inv = run.number(TEA_K_SCALE_INV), cache.v_inv = run.number(TEA_V_SCALE_INV);
      cache.kv_stride = p.kv_scale == TEA_KV_SCALE_HEAD;
      return cache;
    }
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
            .dv_amax = run.number(TEA_DV_AMAX),
            .kv_stride = 0};
  }

  void fill_tensors(AttentionArguments& a) const {
    a.q = tensor(TEA_Q, size.q), a.k = tensor(TEA_K, size.k), a.v = tensor(TEA_V, size.v);
    a.o = tensor(TEA_O, size.o);
    const auto is_given = [&](tea_tensor t) { return run.tensor[t] != nullptr; };
    if (is_given(TEA_DOUT) || is_given(TEA_DQ) || is_given(TEA_DK) || is_given(TEA_DV)) {
      a.dout = tensor(TEA_DOUT, size.dout), a.dq = tensor(TEA_DQ, size.dq);
      a.dk = tensor(TEA_DK, size.dk), a.dv = tensor(TEA_DV, size.dv);
    }
    a.queries = queries(), a.keys = keys();
    a.page_table_k = page_table_k(), a.page_table_v = page_table_v();
    a.statistics = statistics(), a.bias = bias(), a.fp8 = fp8_scales();
    a.sink = p.softmax == TEA_SOFTMAX_LEARNABLE ? run.as<const float>(TEA_SINK) : nullptr;
    a.dsink = run.as<float>(TEA_DSINK);
    a.slopes = p.alibi == TEA_ALIBI_SLOPES ? run.as<const float>(TEA_SLOPES) : nullptr;
    a.slopes_stride = size.slopes;
    a.rng = p.drops() ? run.as<const int64_t>(TEA_RNG_STATE) : nullptr;
  }

  void fill_rules(AttentionArguments& a) const {
    const bool dense = p.q_form == TEA_DENSE && p.kv_form == TEA_DENSE;
    a.mask = p.mask();
    a.is_uniform = dense && !run.origin_device;
    if (a.is_uniform)
      a.uniform_pair =
          make_sequence_pair(a.mask, 0, dense_sequence(size.max_q), dense_sequence(size.max_kv),
                             run.origin[2], run.origin[3], run.shift);
    a.batch = dense && size.max_q == 0 && size.max_kv == 0 ? 0 : size.batch;
    a.heads_q = p.heads_q, a.heads_kv = p.heads_kv, a.dim_qk = p.dim_qk, a.dim_v = p.v_dim();
    a.alibi = p.alibi, a.softmax = p.softmax;
    a.has_dropout = p.drops();
    a.batch_invariant = p.batch_invariant;
    a.max_ctas = p.max_ctas, a.accumulate = run.accumulate;
    a.dropout_threshold = p.drops() ? dropout_threshold(static_cast<float>(p.dropout)) : 0;
    a.keep_factor = p.drops() ? static_cast<float>(1 / (1 - p.dropout)) : 1.0f;
    a.scale = static_cast<float>(p.scale_value()), a.softcap = static_cast<float>(p.softcap);
    a.dp_dtype = !p.is_fp8() || is_fp8(p.dout_type()) ? p.dout_type() : +TEA_E5M2;
  }
};

}  // namespace

AttentionArguments make_arguments(const Problem& problem, const Run& run) {
  AttentionArguments a{};
  const Builder build{problem, run};
  build.fill_tensors(a);
  build.fill_rules(a);
  std::memcpy(a.origin, run.origin, sizeof a.origin);
  a.shift = run.shift, a.origin_stride = run.origin_stride;
  a.origin_device = run.origin_device, a.status = run.status, a.workspace = run.workspace;
  return a;
}

}  // namespace tea
