// The distribution of the random draws.
#include "kit/draw.h"

#include <algorithm>
#include <cmath>

#include "kit/random.h"
#include "kit/tensors.h"

namespace tea::kit {
namespace {

// b * h * s^2 * d of one draw; a draw of this size takes a few milliseconds.
constexpr double kBudget = 5e5;
constexpr int64_t kClasses = 12;   // of values
constexpr double kElements = 1e5;  // of the longer side

template <class T, size_t N>
T pick(Random& r, const T (&values)[N]) {
  return values[r.below(N)];
}

// Lengths around the edges of the tiles that kernels use, and the degenerate ones.
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

// Keys and values alone in FP8.
void draw_cache(Random& r, Problem& p) {
  if (!r.one_in(3)) return;
  p.kv_dtype = r.one_in(3) ? TEA_E5M2 : TEA_E4M3;
  p.kv_scale = r.one_in(2) ? TEA_KV_SCALE_HEAD : TEA_KV_SCALE_TENSOR;
}

void draw_types(Random& r, Problem& p) {
  constexpr int32_t kTypes[] = {TEA_FP16, TEA_FP16, TEA_BF16, TEA_BF16, TEA_FP32,
                                TEA_FP64, TEA_E4M3, TEA_E4M3, TEA_E5M2};
  constexpr int32_t kWider[] = {0, TEA_FP16, TEA_BF16, TEA_FP32};
  constexpr int32_t kGradient[] = {0, 0, TEA_E5M2, TEA_BF16};
  p.dtype = pick(r, kTypes);
  if (!p.training && (p.dtype == TEA_FP16 || p.dtype == TEA_BF16)) draw_cache(r, p);
  if (!is_fp8(p.dtype)) return;
  p.o_dtype = pick(r, kWider);
  if (!p.training) return;
  p.dout_dtype = pick(r, kGradient);
  p.dqkv_dtype = pick(r, kGradient);
}

void draw_heads(Random& r, Problem& p) {
  constexpr int32_t kHeads[] = {1, 1, 2, 2, 3, 4};
  constexpr int32_t kGroup[] = {1, 1, 1, 2, 3, 8};
  constexpr int32_t kDims[] = {8, 16, 24, 32, 40, 64, 64, 72, 80, 96, 128, 192, 256, 512};
  p.heads_kv = pick(r, kHeads);
  p.heads_q = p.heads_kv * pick(r, kGroup);
  // MLA's latent cache, and sizes that only inference has.
  constexpr int32_t kLargeDims[] = {520, 576, 768, 1000, 1024};
  const auto dim = [&] {
    return !p.training && r.one_in(12) ? pick(r, kLargeDims) : pick(r, kDims);
  };
  p.dim_qk = dim();
  if (r.one_in(3)) p.dim_v = dim();
}

void draw_forms(Random& r, Problem& p) {
  constexpr int32_t kForms[] = {TEA_DENSE, TEA_PADDED, TEA_RAGGED, TEA_RAGGED};
  p.q_form = pick(r, kForms);
  p.kv_form = r.one_in(5) ? pick(r, kForms) : p.q_form;
  if (!p.training && r.one_in(4)) {
    p.kv_form = TEA_PAGED;
    p.page_size = static_cast<int32_t>(pick(r, {1, 2, 3, 8, 16, 64}));
  }
  const bool ragged = p.q_form == TEA_RAGGED || p.kv_form == TEA_RAGGED;
  p.gaps = ragged && r.one_in(2);
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

// Lengths per sequence, or the sizes of a dense side, within the budget.
void draw_sizes(Random& r, Case& c) {
  Problem& p = c.problem;
  const int64_t batch = r.one_in(40) ? 0 : 1 + r.below(p.varies() ? 4 : 3);
  const double cost =
      static_cast<double>(std::max<int64_t>(batch, 1)) * p.heads_q * std::max(p.dim_qk, p.v_dim());
  const auto square = static_cast<int64_t>(kBudget / cost);
  // Long against short in either direction, or both alike.
  const auto side = static_cast<int64_t>(std::sqrt(static_cast<double>(square)));
  int64_t most_q = std::max<int64_t>(side, 2), most_kv = most_q;
  const int64_t longest = std::min({square, int64_t{1100}, static_cast<int64_t>(kElements / cost)});
  if (r.one_in(4))
    most_q = 1 + r.below(3), most_kv = std::max(longest, most_kv);
  else if (r.one_in(6))
    most_kv = 1 + r.below(3), most_q = std::max(longest, most_q);
  const bool long_side = most_q > side + 2 || most_kv > side + 2;
  const auto one = [&](int64_t most) {
    return long_side && most > 3 && r.one_in(2) ? 1 + r.below(most) : length(r, most);
  };
  const int64_t q = one(most_q), kv = r.one_in(3) ? std::min(q, most_kv) : one(most_kv);
  if (!p.varies()) p.batch = batch;
  if (!p.varies_q()) p.seqlen_q = q;
  if (!p.varies_kv()) p.seqlen_kv = kv;
  const bool same = r.one_in(2);
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t len_q = p.varies_q() ? length(r, most_q) : r.one_in(3) ? q : r.below(q + 1);
    const int64_t len_kv = p.varies_kv() ? one(most_kv) : r.one_in(3) ? kv : r.below(kv + 1);
    if (p.q_form != TEA_DENSE) c.lens_q.push_back(len_q);
    const bool fits = p.varies_kv() ? len_q <= most_kv : len_q <= kv;
    if (p.kv_form != TEA_DENSE)
      c.lens_kv.push_back(same && fits && p.q_form != TEA_DENSE ? len_q : len_kv);
  }
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
}

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

Case draw(uint64_t seed) {
  Random r(seed, 1000);
  Case c;
  Problem& p = c.problem;
  c.seed = seed;
  p.training = !r.one_in(4);
  draw_types(r, p);
  draw_heads(r, p);
  draw_forms(r, p);
  draw_mask(r, p);
  draw_scores(r, p);
  draw_sizes(r, c);
  draw_words(r, c);
  fit_layout(c);
  fit_values(c);
  return c;
}

Case draw_decoding(uint64_t seed) {
  constexpr int32_t kHeads[] = {1, 1, 2, 3, 8}, kGroup[] = {1, 2, 4, 7, 8, 16, 64};
  constexpr int32_t kDims[] = {8, 40, 64, 64, 72, 96, 128, 128, 128, 192, 192, 256};
  constexpr int32_t kForms[] = {TEA_DENSE, TEA_PADDED, TEA_RAGGED};
  constexpr int32_t kPages[] = {1, 2, 3, 8, 16, 16, 64, 100, 256};
  Random r(seed, 3000);
  Case c;
  Problem& p = c.problem;
  c.seed = seed;
  p.dtype = r.one_in(2) ? TEA_FP16 : TEA_BF16;
  draw_cache(r, p);
  p.heads_kv = pick(r, kHeads), p.heads_q = p.heads_kv * pick(r, kGroup);
  p.dim_qk = pick(r, kDims);
  if (p.dim_qk == 192 || r.one_in(4)) p.dim_v = r.one_in(2) ? 128 : pick(r, kDims);
  p.q_form = pick(r, kForms), p.kv_form = r.one_in(2) ? +TEA_PAGED : pick(r, kForms);
  if (p.kv_form == TEA_PAGED) p.page_size = pick(r, kPages);
  p.gaps = (p.q_form == TEA_RAGGED || p.kv_form == TEA_RAGGED) && r.one_in(2);
  draw_mask(r, p);
  if (p.window_left > 1 && r.one_in(2)) p.window_left *= 1 + r.below(30);
  draw_scores(r, p);

  const int64_t batch = r.one_in(40) ? 0 : 1 + r.below(5), most_q = 64 / (p.heads_q / p.heads_kv);
  const int64_t q = r.one_in(2) ? 1 : 1 + r.below(most_q + 1);  // or one more than packed rows
  const double cost = static_cast<double>(std::max<int64_t>(batch, 1) * q) * p.heads_q *
                      std::max(p.dim_qk, p.v_dim());
  const auto most_kv =
      std::clamp(static_cast<int64_t>(20 * kBudget / cost), int64_t{64}, int64_t{4096});
  const auto keys = [&] {
    return r.one_in(3) ? length(r, most_kv) : most_kv - r.below(most_kv / (1 + r.below(8)));
  };
  const int64_t kv = keys();
  if (!p.varies()) p.batch = batch;
  if (!p.varies_q()) p.seqlen_q = q;
  if (!p.varies_kv()) p.seqlen_kv = kv;
  for (int64_t b = 0; b < batch; ++b) {
    if (p.q_form != TEA_DENSE) c.lens_q.push_back(r.one_in(2) ? q : r.below(q + 1));
    if (p.kv_form != TEA_DENSE) c.lens_kv.push_back(std::min(keys(), kv));
  }
  draw_words(r, c);
  fit_layout(c);
  fit_values(c);
  if (r.one_in(4)) p.o_dtype = TEA_FP32, c.shift = r.below(600) - 300;
  return c;
}

Case draw_part(uint64_t seed) {
  Case c = draw(seed);
  Random r(seed, 2000);
  Problem& p = c.problem;
  if (p.dtype == TEA_FP16 || p.dtype == TEA_BF16) {
    const int32_t types[] = {0, TEA_FP32, p.dtype};
    p.o_dtype = pick(r, types);
    if (p.training) p.dout_dtype = pick(r, types), p.dqkv_dtype = pick(r, types);
  }
  constexpr int64_t kSpread = 24;
  if (r.one_in(2)) c.shift = r.below(2 * kSpread) - kSpread;
  if (r.one_in(4)) return c;
  for (int i = 0; i < 4; ++i) c.origin_step[i] = r.below(i < 2 ? 3 : kSpread);
  c.origin_step[4] = r.below(2 * kSpread) - kSpread;
  return c;
}

}  // namespace tea::kit
