// The distribution of the random draws.
#include "kit/draw.h"

#include <algorithm>
#include <cmath>

#include "kit/draw_fields.h"

namespace tea::kit {
namespace {

// b * h * s^2 * d of one draw; a draw of this size takes a few milliseconds.
constexpr double kBudget = 5e5;
constexpr double kTrainingBudget = 12e6;  // of training, whose lengths have several tiles
constexpr double kElements = 1e5;         // of the longer side

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
  set_sizes(p, batch, q, kv);
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

// An origin and a shift of the diagonal for each sequence.
void draw_origins(Random& r, Case& c) {
  constexpr int64_t kSpread = 24;
  if (r.one_in(2)) c.shift = r.below(2 * kSpread) - kSpread;
  if (r.one_in(4)) return;
  for (int i = 0; i < 4; ++i) c.origin_step[i] = r.below(i < 2 ? 3 : kSpread);
  c.origin_step[4] = r.below(2 * kSpread) - kSpread;
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
  draw_limit(r, p);
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
  set_sizes(p, batch, q, kv);
  for (int64_t b = 0; b < batch; ++b) {
    if (p.q_form != TEA_DENSE) c.lens_q.push_back(r.one_in(2) ? q : r.below(q + 1));
    if (p.kv_form != TEA_DENSE) c.lens_kv.push_back(std::min(keys(), kv));
  }
  draw_words(r, c);
  if (r.one_in(4)) p.o_dtype = TEA_FP32, c.shift = r.below(600) - 300;
  draw_limit(r, p);
  return c;
}

Case draw_prefill(uint64_t seed) {
  constexpr int32_t kHeads[] = {1, 1, 1, 2, 3}, kGroup[] = {1, 1, 2, 4, 8};
  constexpr int32_t kDims[] = {8, 40, 64, 64, 64, 72, 96, 128, 128, 128, 136, 192, 192, 256, 256};
  constexpr int32_t kForms[] = {TEA_DENSE, TEA_PADDED, TEA_RAGGED, TEA_RAGGED};
  constexpr int32_t kPages[] = {8, 8, 16, 16, 16, 24, 32, 40, 64, 64, 80, 96, 128, 256};
  Random r(Random(seed, 5000).next());
  Case c;
  Problem& p = c.problem;
  c.seed = seed;
  p.dtype = r.one_in(2) ? TEA_FP16 : TEA_BF16;
  p.heads_kv = pick(r, kHeads), p.heads_q = p.heads_kv * pick(r, kGroup);
  p.dim_qk = pick(r, kDims);
  if (p.dim_qk == 192 || r.one_in(4)) p.dim_v = r.one_in(2) ? 128 : pick(r, kDims);
  p.q_form = pick(r, kForms), p.kv_form = TEA_PAGED;
  p.page_size = r.one_in(30) ? 12 : pick(r, kPages);
  p.gaps = p.q_form == TEA_RAGGED && r.one_in(2);
  draw_mask(r, p);
  if (p.window_left > 1 && r.one_in(2)) p.window_left *= 1 + r.below(8);
  draw_scores(r, p);
  if (!r.one_in(8)) p.bias = p.bias_broadcast = p.bias_dtype = 0;  // which these kernels lack
  if (r.one_in(2)) p.alibi = 0, p.softcap = 0, p.has_scale = 0, p.scale = 0;
  p.batch_invariant = 0;

  const int64_t batch = r.one_in(40) ? 0 : 1 + r.below(4);
  const double cost =
      static_cast<double>(std::max<int64_t>(batch, 1)) * p.heads_q * std::max(p.dim_qk, p.v_dim());
  const auto square = static_cast<int64_t>(kTrainingBudget / cost);
  const auto most_q = std::clamp<int64_t>(square / 256, 70, 420),
             most_kv = std::clamp<int64_t>(square / most_q, 70, 1100);
  const auto queries = [&] { return 65 + r.below(most_q - 64); };
  const auto keys = [&] { return r.one_in(3) ? length(r, most_kv) : 1 + r.below(most_kv); };
  const int64_t q = queries(), kv = keys();
  set_sizes(p, batch, q, kv);
  for (int64_t b = 0; b < batch; ++b) {
    if (p.q_form != TEA_DENSE) c.lens_q.push_back(r.one_in(3) ? r.below(q + 1) : q);
    c.lens_kv.push_back(keys());
  }
  draw_words(r, c);
  draw_limit(r, p);
  return c;
}

Case draw_training(uint64_t seed) {
  constexpr int32_t kHeads[] = {1, 1, 1, 2, 3}, kGroup[] = {1, 1, 1, 2, 2, 3, 4, 8};
  constexpr int32_t kDims[] = {8, 24, 40, 64, 64, 64, 72, 80, 88, 96, 96, 104, 128, 128, 128};
  constexpr int32_t kForms[] = {TEA_DENSE, TEA_PADDED, TEA_RAGGED, TEA_RAGGED};
  // Streams of consecutive seeds are the same numbers, shifted by one, unless the seed is mixed.
  Random r(Random(seed, 4000).next());
  Case c;
  Problem& p = c.problem;
  c.seed = seed;
  p.training = 1;
  p.dtype = r.one_in(2) ? TEA_FP16 : TEA_BF16;
  if (r.one_in(4)) p.dqkv_dtype = TEA_FP32;
  if (r.one_in(4)) p.o_dtype = TEA_FP32, p.dout_dtype = p.dtype;
  p.heads_kv = pick(r, kHeads), p.heads_q = p.heads_kv * pick(r, kGroup);
  p.dim_qk = pick(r, kDims);
  if (r.one_in(3)) p.dim_v = pick(r, kDims);
  p.q_form = pick(r, kForms), p.kv_form = r.one_in(5) ? pick(r, kForms) : p.q_form;
  p.gaps = (p.q_form == TEA_RAGGED || p.kv_form == TEA_RAGGED) && r.one_in(2);
  draw_mask(r, p);
  if (p.window_left > 1 && r.one_in(2)) p.window_left *= 1 + r.below(4);
  draw_scores(r, p);
  p.bias = p.bias_broadcast = p.bias_dtype = p.alibi = p.batch_invariant = 0;
  p.softcap = p.dropout = 0;
  if (p.has_scale && p.scale == 0) p.scale = 1e-3f;

  const int64_t batch = r.one_in(40) ? 0 : 1 + r.below(3);
  const double cost =
      static_cast<double>(std::max<int64_t>(batch, 1)) * p.heads_q * std::max(p.dim_qk, p.v_dim());
  const auto most =
      std::clamp(static_cast<int64_t>(std::sqrt(kTrainingBudget / cost)), int64_t{2}, int64_t{600});
  const auto one = [&] { return r.one_in(3) ? length(r, most) : 1 + r.below(most); };
  const int64_t q = one(), kv = r.one_in(3) ? q : one();
  set_sizes(p, batch, q, kv);
  const bool same = q == kv && p.q_form == p.kv_form;
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t len = r.one_in(3) ? q : r.below(q + 1);
    if (p.q_form != TEA_DENSE) c.lens_q.push_back(len);
    if (p.kv_form != TEA_DENSE)
      c.lens_kv.push_back(same ? len : r.one_in(3) ? kv : r.below(kv + 1));
  }
  draw_words(r, c);
  p.alignment = p.alignment < 16 ? 0 : p.alignment;
  if (r.one_in(3)) draw_origins(r, c);
  draw_limit(r, p);
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
  draw_origins(r, c);
  return c;
}

}  // namespace tea::kit
