// One small function per part of the Problem.
#include "nvte/problem.h"

#include <limits>

#include "core/error.h"
#include "core/geometry.h"
#include "nvte/layout.h"

namespace tea::nvte {
namespace {

// Indexed by NVTE_Mask_Type.
constexpr Mask kMasks[] = {{false, false, false}, {true, false, false}, {false, true, false},
                           {true, true, false},   {false, true, true},  {true, true, true}};

constexpr struct {
  NVTEDType nvte;
  tea_dtype tea;
} kTypes[] = {{kNVTEFloat16, TEA_FP16},
              {kNVTEBFloat16, TEA_BF16},
              {kNVTEFloat32, TEA_FP32},
              {kNVTEFloat8E4M3, TEA_E4M3},
              {kNVTEFloat8E5M2, TEA_E5M2}};

constexpr struct {
  int32_t bias, alibi;
} kBiases[] = {{TEA_BIAS_NONE, TEA_ALIBI_NONE},
               {TEA_BIAS_PRE_SCALE, TEA_ALIBI_NONE},
               {TEA_BIAS_POST_SCALE, TEA_ALIBI_NONE},
               {TEA_BIAS_NONE, TEA_ALIBI_STANDARD}};

tea_dtype needed_type(const char* name, NVTEDType type) {
  const tea_dtype dtype = dtype_of(type);
  TEA_REQUIRE(dtype, name, static_cast<int>(type),
              "kNVTEFloat16, kNVTEBFloat16, kNVTEFloat32, kNVTEFloat8E4M3 or kNVTEFloat8E5M2");
  return dtype;
}

int32_t needed_int32(const char* name, int64_t value) {
  TEA_REQUIRE(value >= 0 && value <= std::numeric_limits<int32_t>::max(), name, value,
              "at most 2^31 - 1");
  return static_cast<int32_t>(value);
}

// A value outside an enum is invalid in the selector, too, so this throws an Error.
template <class Enum>
Enum needed_enum(const char* name, Enum value, Enum last) {
  const auto number = static_cast<uint32_t>(value);
  TEA_REQUIRE(number <= static_cast<uint32_t>(last), name, static_cast<int32_t>(number),
              "a value from 0 to " + shown(static_cast<int>(last)));
  return value;
}

void set_types(Problem& p, const Work& w) {
  p.dtype = needed_type("q_dtype", w.types.q);
  p.o_dtype = needed_type("dtype of O", w.types.o);
  if (w.options.training) {
    p.dout_dtype = needed_type("dtype of dO", w.types.dout);
    p.dqkv_dtype = needed_type("dtype of dQ", w.types.dqkv);
  }
  p.training = w.options.training;
  p.deterministic = w.options.deterministic;
  p.outputs = w.options.max_logit ? TEA_OUTPUT_MAX | TEA_OUTPUT_SUM_EXP : TEA_OUTPUT_LSE;
}

int32_t form(bool paged, bool ragged, bool padded) {
  if (paged) return TEA_PAGED;
  if (ragged) return TEA_RAGGED;
  return padded ? TEA_PADDED : TEA_DENSE;
}

void set_sizes(Problem& p, const Work& w, const Layout& layout) {
  const Sizes& s = w.sizes;
  const bool padded = mask_of(w.options.mask).padding;
  p.q_form = form(false, layout.ragged_q(), padded);
  p.kv_form = form(layout.paged(), layout.ragged_kv(), padded);
  p.gaps = w.gaps && layout.any_ragged();
  p.heads_q = needed_int32("heads of Q", s.heads_q);
  p.heads_kv = needed_int32("heads of K", s.heads_kv);
  p.dim_qk = needed_int32("head dim of Q", s.dim_qk);
  p.dim_v = needed_int32("head dim of V", s.dim_v);
  if (!p.varies()) p.batch = s.batch;
  if (!p.varies_q()) p.seqlen_q = s.max_q;
  if (!p.varies_kv()) p.seqlen_kv = s.max_kv;
}

// The bound plus one; 0 (no bound) for a bound beyond every length.
int64_t window_field(const char* name, int64_t bound) {
  TEA_REQUIRE(bound >= -1, name, bound, "-1 (no bound) or more");
  return bound < kUnbounded ? bound + 1 : 0;
}

void set_mask(Problem& p, const Options& o) {
  const Mask mask = mask_of(o.mask);
  p.causal = mask.causal;
  p.bottom_right = mask.causal ? mask.bottom_right : o.bottom_right;
  p.window_left = window_field("window_size_left", o.window_left);
  p.window_right = window_field("window_size_right", o.window_right);
}

void set_scores(Problem& p, const Work& w) {
  const Options& o = w.options;
  p.bias = kBiases[o.bias].bias;
  p.alibi = kBiases[o.bias].alibi;
  if (p.bias) {
    p.bias_broadcast = w.bias_broadcast;
    // With 16-bit inputs the dtype of a bias is not reliable; see docs/compatibility.md.
    if (p.is_fp8()) p.bias_dtype = needed_type("dtype of Bias", w.types.bias);
  }
  p.softmax = o.softmax;
  p.dropout = o.training ? o.dropout : 0;
  p.scale = o.scale;
  p.has_scale = 1;
}

void set_pages(Problem& p, const Sizes& s) {
  p.page_size = needed_int32("page size of K", s.k.size);
  TEA_REQUIRE(s.k.size == s.v.size, "page size of V", s.v.size,
              "that of K, which is " + shown(s.k.size));
  const int64_t columns = s.k.size > 0 ? (s.max_kv + s.k.size - 1) / s.k.size : 0;
  TEA_REQUIRE(s.k.columns >= columns, "page_table_k's second dimension", s.k.columns,
              "at least " + shown(columns) + ", the pages of max_seqlen_kv rows");
  TEA_REQUIRE(s.v.columns >= columns, "page_table_v's second dimension", s.v.columns,
              "at least " + shown(columns) + ", the pages of max_seqlen_kv rows");
  p.table_k_stride = s.k.columns;
  p.table_v_stride = s.v.columns;
}

void set_strides(Problem& p, const Work& w, const Layout& layout) {
  const Sizes& s = w.sizes;
  const Packing packing_q = layout.packing_q(), packing_kv = layout.packing_kv(), alone;
  const bool paged = layout.paged();
  const auto kv = [&](const Pages& pages, int64_t dim) {
    return strides(layout.kv, packing_kv,
                   {paged ? pages.count : s.batch, paged ? pages.size : s.max_kv, s.heads_kv, dim});
  };
  p.q = strides(layout.q, packing_q, {s.batch, s.max_q, s.heads_q, s.dim_qk});
  p.k = kv(s.k, s.dim_qk);
  p.v = kv(s.v, s.dim_v);
  p.o = strides(layout.q, alone, {s.batch, s.max_q, s.heads_q, s.dim_v});
  if (!w.options.training) return;
  p.dout = p.o, p.dq = p.q, p.dk = p.k, p.dv = p.v;
}

// Tensors in one buffer must have equal sizes.
void check_packing(const Work& w, const Layout& layout) {
  const Sizes& s = w.sizes;
  TEA_REQUIRE(layout.packing_kv().tensors == 1 || s.dim_v == s.dim_qk, "head dim of V", s.dim_v,
              "that of K, which is " + shown(s.dim_qk) + ": the layout packs K and V");
  if (layout.packing_q().tensors == 1) return;
  TEA_REQUIRE(s.heads_kv == s.heads_q, "heads of K", s.heads_kv,
              "those of Q, which are " + shown(s.heads_q) + ": the layout packs Q, K and V");
  TEA_REQUIRE(s.max_kv == s.max_q, "max_seqlen_kv", s.max_kv,
              "max_seqlen_q, which is " + shown(s.max_q) + ": the layout packs Q, K and V");
}

void check_fp8(const Work& w) {
  if (!is_fp8(w.types.q)) return;
  TEA_REQUIRE(!w.options.max_logit, "return_max_logit", 1,
              "0 for FP8: its auxiliary tensors have no place for the maxima");
}

}  // namespace

Mask mask_of(NVTE_Mask_Type type) {
  return kMasks[needed_enum("attn_mask_type", type, NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK)];
}

tea_dtype dtype_of(NVTEDType type) {
  for (const auto& row : kTypes)
    if (row.nvte == type) return row.tea;
  return TEA_DTYPE_DEFAULT;
}

Problem problem_of(const Work& work) {
  const Layout& layout = layout_of(work.options.layout);
  Problem p{};
  p.struct_size = sizeof(tea_problem);
  set_types(p, work);
  set_sizes(p, work, layout);
  set_mask(p, work.options);
  set_scores(p, work);
  if (layout.paged()) set_pages(p, work.sizes);
  set_strides(p, work, layout);
  return p;
}

tea_run run_of(const Work& work) {
  const Layout& layout = layout_of(work.options.layout);
  const Sizes& s = work.sizes;
  tea_run run{};
  run.struct_size = sizeof run;
  if (!layout.any_ragged() && !layout.paged()) return run;
  run.batch = s.batch;
  if (layout.ragged_q()) run.max_q = s.max_q, run.tokens_q = s.tokens_q;
  if (layout.ragged_kv()) run.max_kv = s.max_kv, run.tokens_kv = s.tokens_kv;
  if (layout.paged()) run.max_kv = s.max_kv, run.pages_k = s.k.count, run.pages_v = s.v.count;
  return run;
}

std::string refusal(const Work& work) {
  const Layout& layout = layout_of(work.options.layout);
  mask_of(work.options.mask);  // throws for a value outside the enum
  needed_enum("bias_type", work.options.bias, NVTE_ALIBI);
  needed_enum("softmax_type", work.options.softmax, NVTE_LEARNABLE_SOFTMAX);
  try {
    check_packing(work, layout);
    check_fp8(work);
    const Problem p = problem_of(work);
    p.check();
    const tea_run run = run_of(work);
    geometry(p, &run);
  } catch (const Error& e) {
    return std::string(
               "Invalid combination of data type and sequence length for fused attention. ") +
           e.what();
  }
  return {};
}

}  // namespace tea::nvte
