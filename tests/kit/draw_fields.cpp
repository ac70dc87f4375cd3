// The distribution of the shared fields.
#include "kit/draw_fields.h"

#include <algorithm>

#include "kit/tensors.h"

namespace tea::kit {
namespace {

constexpr int64_t kClasses = 12;  // of values

// Where sequences share keys, one attends to what is poison for another; and what dropout or a cast
// to fp8 makes of a NaN is not promised.
void fit_values(Case& c) {
  const bool shares = c.layout == Layout::kShared || c.shared_first;
  const bool vague = is_fp8(c.problem.dtype) || c.problem.dropout > 0;
  if ((c.values == Values::kNanMasked && shares) ||
      (c.values == Values::kNanAttended && (shares || vague)))
    c.values = Values::kOutliers;
}

// A layout that packs Q with K and V needs the same type, form and lengths of both sides.
void fit_layout(Case& c) {
  const Problem& p = c.problem;
  const bool three = c.layout == Layout::kPacked3 || c.layout == Layout::kInterleaved3;
  if (!three) return;
  const bool is_packable = !p.kv_dtype && p.q_form == p.kv_form && p.seqlen_q == p.seqlen_kv &&
                           c.lens_q == c.lens_kv && c.max_q == c.max_kv;
  if (!is_packable)
    c.layout = c.layout == Layout::kPacked3 ? Layout::kPacked2 : Layout::kInterleaved2;
  if (c.layout == Layout::kInterleaved3 && p.heads_q != p.heads_kv) c.layout = Layout::kPacked3;
}

}  // namespace

int64_t length(Random& r, int64_t most) {
  constexpr int64_t kTiles[] = {8, 16, 32, 64, 128};
  int64_t n = 0;
  switch (r.below(8)) {
    case 0:
      n = r.below(2);
      break;
    case 1:
    case 2:
      n = pick(r, kTiles) + r.below(3) - 1;
      break;
    case 3:
      n = 128 * r.below(2) + 64;  // s % 128 == 64
      break;
    default:
      n = 1 + r.below(48);
  }
  return std::min(n, most);
}

void draw_cache(Random& r, Problem& p) {
  if (!r.one_in(3)) return;
  p.kv_dtype = r.one_in(3) ? TEA_E5M2 : TEA_E4M3;
  p.kv_scale = r.one_in(2) ? TEA_KV_SCALE_HEAD : TEA_KV_SCALE_TENSOR;
}

void draw_mask(Random& r, Problem& p) {
  p.causal = r.one_in(2);
  p.bottom_right = r.one_in(3);
  const auto bound = [&r] { return r.one_in(4) ? 1 : 1 + length(r, 100); };
  if (r.one_in(3)) p.window_left = bound();
  if (r.one_in(4)) p.window_right = bound();
}

void draw_scores(Random& r, Problem& p) {
  if (r.one_in(3)) p.bias = 1 + static_cast<int32_t>(r.below(2));
  if (p.bias && r.one_in(2)) p.bias_broadcast = static_cast<int32_t>(r.below(16));
  if (p.bias && r.one_in(4)) p.bias_dtype = TEA_FP32;
  if (r.one_in(5)) p.alibi = 1 + static_cast<int32_t>(r.below(2));
  if (r.one_in(3)) p.softmax = 1 + static_cast<int32_t>(r.below(2));
  if (r.one_in(5)) p.softcap = pick(r, {0.5f, 5.0f, 30.0f, 50.0f});
  if (p.training && r.one_in(4)) p.dropout = pick(r, {0.1f, 0.5f, 0.9f, 1e-5f, 0.99999f});
  if (r.one_in(4)) {
    p.has_scale = 1;
    p.scale = pick(r, {1.0f, 0.0f, -0.25f, 0.37f});
  }
  p.outputs = r.one_in(2) ? static_cast<int32_t>(r.below(8)) : 0;
  p.lse_gradient = p.training && r.one_in(4);
  p.deterministic = r.one_in(4);
  p.batch_invariant = r.one_in(8);
}

void set_sizes(Problem& p, int64_t batch, int64_t q, int64_t kv) {
  if (!p.varies()) p.batch = batch;
  if (!p.varies_q()) p.seqlen_q = q;
  if (!p.varies_kv()) p.seqlen_kv = kv;
}

void draw_words(Random& r, Case& c) {
  Problem& p = c.problem;
  // Packed storages keep 16 bytes; a fp64 element needs 8.
  if (r.one_in(6)) p.alignment = p.dtype == TEA_FP64 ? 8 : static_cast<int32_t>(4 << r.below(3));
  if (p.gaps) c.gap = r.below(4);
  if (r.one_in(3)) c.tail = r.below(5);
  if (p.varies_q() && r.one_in(3) && !c.lens_q.empty())
    c.max_q = *std::max_element(c.lens_q.begin(), c.lens_q.end()) + r.below(9);
  if (p.varies_kv() && r.one_in(3) && !c.lens_kv.empty())
    c.max_kv = *std::max_element(c.lens_kv.begin(), c.lens_kv.end()) + r.below(9);
  if (p.kv_form == TEA_PAGED) {
    c.spare_pages = r.below(4);
    c.one_table = r.one_in(4);
    c.shared_first = r.one_in(6);
  }
  c.values = r.one_in(4) ? Values::kRandn : static_cast<Values>(r.below(kClasses));
  c.layout = r.one_in(2) ? Layout::kDefault : static_cast<Layout>(r.below(10));
  if (is_fp8(p.dtype) || p.kv_dtype) c.scales = static_cast<Scales>(r.below(3));
  if (p.softmax == TEA_SOFTMAX_LEARNABLE && r.one_in(3)) c.sink_mean = pick(r, {-50, 5, 50});
  if (p.bias && r.one_in(6)) c.bias_mean = pick(r, {-100, 100});
  c.omit_optional = r.one_in(6);
  if (r.one_in(4)) {
    c.origin[0] = r.below(3), c.origin[1] = r.below(5);
    c.origin[2] = r.below(40), c.origin[3] = r.below(40);
    c.origin_in_memory = r.one_in(2);
  }
  fit_layout(c);
  fit_values(c);
}

void draw_limit(Random& r, Problem& p) {
  if (r.one_in(8)) p.max_ctas = static_cast<int32_t>(1 + r.below(40));
}

}  // namespace tea::kit
