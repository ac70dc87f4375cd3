// The selector. It accepts every valid Problem, because an engine exists for each on the host and
// on the supported GPUs.
#include "nvte/backend.h"

#include <algorithm>

#include "core/driver.h"
#include "core/env.h"
#include "core/error.h"
#include "core/registry.h"
#include "nvte/boundary.h"
#include "nvte/layout.h"
#include "nvte/problem.h"
#include "nvte/work.h"

namespace tea::nvte {
namespace {

template <class T, size_t N>
bool among(const T (&set)[N], T value) {
  return std::find(std::begin(set), std::end(set), value) != std::end(set);
}

bool short_multiple_of_64(int64_t length) {
  return length > 0 && length <= 512 && length % 64 == 0;
}

// TransformerEngine's rules for its short-sequence kernels. Their auxiliary tensor, two bytes for
// each row and column, stores four bytes per row and a rng_state, which fit from 64 columns on.
bool fits_max512(const Work& w) {
  constexpr NVTE_QKV_Layout kLayouts[] = {NVTE_SB3HD, NVTE_SBHD_SB2HD, NVTE_BS3HD, NVTE_BSHD_BS2HD,
                                          NVTE_BSHD_BSHD_BSHD};
  constexpr NVTE_Mask_Type kMasks[] = {NVTE_NO_MASK, NVTE_CAUSAL_MASK, NVTE_PADDING_MASK};
  constexpr NVTE_Bias_Type kBiases[] = {NVTE_NO_BIAS, NVTE_POST_SCALE_BIAS};
  const Options& o = w.options;
  const Sizes& s = w.sizes;
  const bool mask =
      among(kMasks, o.mask) || (o.mask == NVTE_PADDING_CAUSAL_MASK && s.max_q == s.max_kv);
  const bool window = o.window_left == -1 && (o.window_right == -1 || o.window_right == 0);
  return short_multiple_of_64(s.max_q) && short_multiple_of_64(s.max_kv) && s.dim_qk == 64 &&
         s.dim_v == 64 && s.heads_q == s.heads_kv && among(kBiases, o.bias) &&
         o.softmax == NVTE_VANILLA_SOFTMAX && !o.max_logit && among(kLayouts, o.layout) && mask &&
         window;
}

NVTE_Fused_Attn_Backend class_of(const Work& w) {
  if (is_fp8(w.types.q)) return NVTE_FP8;
  const bool is_16_bit = w.types.q == kNVTEFloat16 || w.types.q == kNVTEBFloat16;
  const bool max512 = is_16_bit && fits_max512(w) && setting_now(Setting::kFusedAttnBackend) == "0";
  return max512 ? NVTE_F16_max512_seqlen : NVTE_F16_arbitrary_seqlen;
}

}  // namespace

bool runs_on_device_in_use() {
  const int device = driver::device_in_use();
  if (device == kHost) return true;
  try {
    return device_at(device).sm >= kLeastSm;
  } catch (const Error&) {  // this build has no engine for GPUs
    return false;
  }
}

NVTE_Fused_Attn_Backend backend_of(const Work& work) {
  return refusal(work).empty() ? class_of(work) : NVTE_No_Backend;
}

NVTE_Fused_Attn_Backend accepted_backend(const Work& work) {
  const std::string why = refusal(work);
  if (!why.empty()) TEA_NVTE_ERROR(why);
  return class_of(work);
}

NVTE_Fused_Attn_Backend accepted_backend(const Work& work, const NVTETensorPack& pack) {
  const NVTE_Fused_Attn_Backend backend = accepted_backend(work);
  const Tensor* const second = find(pack.tensors[1]);
  const bool is_rng_state = second && second->data.data_ptr && second->data.dtype == kNVTEInt64;
  return backend == NVTE_F16_max512_seqlen && is_rng_state ? NVTE_F16_arbitrary_seqlen : backend;
}

}  // namespace tea::nvte

using tea::nvte::backend_of;
using tea::nvte::check_same_type;
using tea::nvte::Pages;
using tea::nvte::runs_on_device_in_use;
using tea::nvte::signed_size;
using tea::nvte::Work;

// NOLINTNEXTLINE(readability-function-size): the signature is TransformerEngine's.
NVTE_Fused_Attn_Backend nvte_get_fused_attn_backend(
    bool is_training, NVTEDType q_dtype, NVTEDType kv_dtype, NVTE_QKV_Layout qkv_layout,
    NVTE_Bias_Type bias_type, NVTE_Mask_Type attn_mask_type, NVTE_Softmax_Type softmax_type,
    float dropout, size_t num_attn_heads, size_t num_gqa_groups, size_t max_seqlen_q,
    size_t max_seqlen_kv, size_t head_dim_qk, size_t head_dim_v, int64_t window_size_left,
    int64_t window_size_right, bool return_max_logit,
    bool /*cuda_graph: every plan can be captured*/, bool deterministic) {
  return TEA_NVTE_EXPORTED({
    check_same_type(q_dtype, kv_dtype);
    Work w;
    w.options = {
        qkv_layout, bias_type, attn_mask_type, softmax_type, window_size_left, window_size_right,
        false,      1,         dropout,        is_training,  return_max_logit, deterministic};
    // One sequence and one page represent any number of them.
    const int64_t rows_q = signed_size(max_seqlen_q), rows_kv = signed_size(max_seqlen_kv);
    const Pages pages{1, std::max<int64_t>(rows_kv, 1), 1};
    w.sizes = {.batch = 1,
               .heads_q = signed_size(num_attn_heads),
               .heads_kv = signed_size(num_gqa_groups),
               .max_q = rows_q,
               .max_kv = rows_kv,
               .dim_qk = signed_size(head_dim_qk),
               .dim_v = signed_size(head_dim_v),
               .tokens_q = rows_q,
               .tokens_kv = rows_kv,
               .k = pages,
               .v = pages};
    w.types = {q_dtype, q_dtype, q_dtype, q_dtype, kNVTEFloat32};
    return runs_on_device_in_use() ? backend_of(w) : NVTE_No_Backend;
  });
}
