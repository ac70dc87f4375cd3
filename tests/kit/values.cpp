// Drawing values per class.
#include "kit/values.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kit/codec.h"
#include "kit/random.h"
#include "kit/tensors.h"

namespace tea::kit {
namespace {

using Array = std::vector<double>;

// The seed of a row: the tensor's role and the class together.
struct Draw {
  Values values;
  tea_tensor tensor;
  int32_t dtype;
  double size;  // of the class, for this tensor
};

bool is_score_operand(tea_tensor t) { return t == TEA_Q || t == TEA_K; }
bool is_wide(int32_t dtype) { return dtype == TEA_BF16 || dtype == TEA_FP32 || dtype == TEA_FP64; }

// Chosen such that scale * q.k is about `logit`.
double operand_size(const Problem& p, double logit, bool adds_up) {
  const double dim = p.dim_qk, terms = adds_up ? dim : std::sqrt(dim);
  return std::sqrt(logit / (std::max(std::fabs(p.scale_value()), 1e-3) * terms));
}

// The largest values whose products and sums a float still holds: no engine keeps wider ones.
double largest_useful(tea_tensor t, int32_t dtype) {
  if (!is_wide(dtype)) return largest_of(dtype);
  return t == TEA_V ? 0x1p100 : t == TEA_DOUT ? 0x1p-60 : 8;
}

Draw draw_for(const Case& c, const Problem& p, tea_tensor t, int32_t dtype) {
  Draw d{c.values, t, dtype, 1};
  const bool score = is_score_operand(t);
  if (c.values == Values::kExtreme) d.size = score ? operand_size(p, 1000, false) : 1;
  if (c.values == Values::kNegative) d.size = score ? operand_size(p, 150, true) : 1;
  if (c.values == Values::kMaxFinite) d.size = largest_useful(t, dtype);
  return d;
}

double element_of(const Draw& d, Random& random) {
  switch (d.values) {
    case Values::kOutliers:
      return random.normal() * (random.one_in(100) ? 1000 : 1);
    case Values::kNegative:
      if (!is_score_operand(d.tensor)) return random.normal();
      return (d.tensor == TEA_Q ? 1 : -1) * d.size * (1 + 0.05 * random.normal());
    case Values::kDenormal:  // of fp32 for fp64, whose own the oracle could not compute either
      return smallest_of(d.dtype == TEA_FP64 ? +TEA_FP32 : d.dtype) *
             std::round(random.normal() * 8);
    case Values::kMaxFinite:
      return d.size * (random.one_in(2) ? 1 : -1) * (random.one_in(2) ? 1 : 0.5);
    case Values::kZero:
      return 0;
    default:
      return random.normal() * d.size;
  }
}

void fill_rows(Array& out, int64_t width, const Draw& d, Random& random) {
  const double limit = largest_of(d.dtype);
  for (size_t row = 0; row * static_cast<size_t>(width) < out.size(); ++row) {
    const int64_t hot = random.below(width);
    for (int64_t i = 0; i < width; ++i) {
      double x = element_of(d, random);
      if (d.values == Values::kOneHot) x = i == hot ? (random.one_in(2) ? 4 : -4) : 0;
      if (d.values == Values::kConstant) x = 0.25 + 0.125 * static_cast<double>(d.tensor % 5);
      out[row * static_cast<size_t>(width) + static_cast<size_t>(i)] = std::clamp(x, -limit, limit);
    }
  }
}

Array rows(const Case& c, const Problem& p, tea_tensor t, int32_t dtype, const Index& shape) {
  Array out(static_cast<size_t>(shape[0] * shape[1] * shape[2] * shape[3]));
  Random random(c.seed, static_cast<uint64_t>(t) + 1);
  fill_rows(out, std::max<int64_t>(shape[3], 1), draw_for(c, p, t, dtype), random);
  return out;
}

// Zero or minus infinity; some whole rows and columns are masked.
double mask_entry(Random& random, bool dead_line) {
  return dead_line || random.one_in(3) ? -std::numeric_limits<double>::infinity() : 0;
}

void fill_bias(const Case& c, int32_t dtype, oracle::Case& out) {
  Random random(c.seed, TEA_BIAS + 1);
  const double limit = largest_of(dtype);
  const double sign = c.values == Values::kMaxFinite ? 0x1p-40 : 1;
  size_t i = 0;
  for (int64_t bh = 0; bh < out.batch * out.heads_q; ++bh)
    for (int64_t row = 0; row < out.max_q; ++row) {
      const bool dead = random.one_in(5);
      for (int64_t col = 0; col < out.max_kv; ++col, ++i) {
        double x = sign * random.normal() + static_cast<double>(c.bias_mean);
        if (c.values == Values::kMaskBias && !is_fp8(dtype)) x = mask_entry(random, dead);
        if (c.values == Values::kZero) x = 0;
        out.bias[i] = std::isinf(x) ? x : std::clamp(x, -limit, limit);
      }
    }
}

void put_nan(Array& rows, int64_t first, int64_t width, bool fp8, Random& random) {
  for (int64_t i = 0; i < width; ++i) {
    const int64_t kind = fp8 ? 0 : random.below(3);
    const double infinity = std::numeric_limits<double>::infinity();
    rows[static_cast<size_t>(first + i)] = kind == 0   ? std::numeric_limits<double>::quiet_NaN()
                                           : kind == 1 ? infinity
                                                       : -infinity;
  }
}

// Keys that no row attends hold NaN and infinity, and so does the bias where it is masked.
void poison_masked(const Case& c, int32_t dtype, oracle::Case& out) {
  Random random(c.seed, 90);
  for (int64_t b = 0; b < out.batch; ++b)
    for (int64_t j = 0; j < out.length_kv[static_cast<size_t>(b)]; ++j) {
      bool attended = false;
      for (int64_t i = 0; i < out.length_q[static_cast<size_t>(b)]; ++i)
        attended |= oracle::visible(out, b, i, j);
      for (int64_t h = 0; h < out.heads_kv && !attended; ++h) {
        const int64_t row = (b * out.heads_kv + h) * out.max_kv + j;
        put_nan(out.k, row * out.dim_qk, out.dim_qk, is_fp8(dtype), random);
        put_nan(out.v, row * out.dim_v, out.dim_v, is_fp8(dtype), random);
      }
    }
  size_t at = 0;
  for (int64_t bh = 0; !out.bias.empty() && bh < out.batch * out.heads_q; ++bh)
    for (int64_t i = 0; i < out.max_q; ++i)
      for (int64_t j = 0; j < out.max_kv; ++j, ++at)
        if (!oracle::visible(out, bh / out.heads_q, i, j))
          out.bias[at] = std::numeric_limits<double>::quiet_NaN();
}

// One number of the first key that every row attends, if there is one.
void poison_attended(oracle::Case& out) {
  for (int64_t b = 0; b < out.batch; ++b) {
    const int64_t rows = out.length_q[static_cast<size_t>(b)];
    for (int64_t j = 0; j < out.length_kv[static_cast<size_t>(b)]; ++j) {
      int64_t seen = 0;
      while (seen < rows && oracle::visible(out, b, seen, j)) ++seen;
      if (seen < rows) continue;
      const int64_t key = (b * out.heads_kv) * out.max_kv + j;
      out.k[static_cast<size_t>(key * out.dim_qk)] = std::numeric_limits<double>::quiet_NaN();
      break;
    }
  }
}

// Of keys and values alone in FP8: exact in fp32.
void make_factors(const Case& c, const Problem& p, oracle::Case& out) {
  if (c.scales == Scales::kNone) return;
  const Scalars s = scalars(c);
  for (int64_t h = 0; h < p.heads_kv; ++h) {
    const double head = p.kv_scale == TEA_KV_SCALE_HEAD ? 1 + 0.25 * static_cast<double>(h) : 1;
    out.k_factors.push_back(s.k_scale_inv * head);
    if (c.scales == Scales::kOwn) out.v_factors.push_back(s.v_scale_inv * head);
  }
}

void make_options(const Case& c, const Problem& p, oracle::Case& out) {
  out.causal = p.causal, out.bottom_right = p.bottom_right;
  out.window_left = p.window_left - 1, out.window_right = p.window_right - 1;
  out.bias_kind = static_cast<oracle::Bias>(p.bias);
  out.softcap = p.softcap;
  out.scale = p.has_scale ? p.scale : 1 / std::sqrt(p.dim_qk);
  out.dropout = p.training ? p.dropout : 0;
  Random random(c.seed, 91);
  out.seed = random.next(), out.offset = random.next();
  std::copy(c.origin, c.origin + 4, out.origin);
  out.origin[4] = c.shift;
  std::copy(c.origin_step, c.origin_step + 5, out.origin_step);
  if (is_fp8(p.kv_dtype)) make_factors(c, p, out);
  if (!is_fp8(p.dtype)) return;
  const int32_t o = p.o_dtype ? p.o_dtype : p.dtype, dout = p.dout_dtype ? p.dout_dtype : o;
  const int32_t dqkv = p.dqkv_dtype ? p.dqkv_dtype : p.dtype;
  const Scalars s = scalars(c);
  out.fp8 = {oracle_type(p.dtype),
             oracle_type(is_fp8(dout) ? dout : +TEA_E5M2),
             s.s_scale,
             s.s_scale_inv,
             s.dp_scale,
             s.dp_scale_inv,
             s.q_scale_inv,
             s.k_scale_inv,
             s.v_scale_inv,
             is_fp8(o) ? s.o_scale_inv : 1,
             is_fp8(dout) ? s.dout_scale_inv : 1,
             is_fp8(o) ? s.o_scale : 1,
             is_fp8(dqkv) ? s.dq_scale : 1,
             is_fp8(dqkv) ? s.dk_scale : 1,
             is_fp8(dqkv) ? s.dv_scale : 1};
}

void make_vectors(const Case& c, const Problem& p, oracle::Case& out) {
  Random random(c.seed, 92);
  const auto as_stored = [&](double x) {
    return p.dtype == TEA_FP64 ? x : static_cast<double>(static_cast<float>(x));
  };
  if (p.softmax == TEA_SOFTMAX_OFF_BY_ONE) out.sink.assign(static_cast<size_t>(p.heads_q), 0);
  if (p.softmax == TEA_SOFTMAX_LEARNABLE)
    for (int64_t h = 0; h < p.heads_q; ++h)
      out.sink.push_back(as_stored(random.normal() + static_cast<double>(c.sink_mean)));
  if (p.alibi == TEA_ALIBI_NONE) return;
  const int64_t heads = p.heads_q;
  int64_t power = 1;
  while (power * 2 <= heads) power *= 2;
  for (int64_t b = 0; b < out.batch; ++b)
    for (int64_t h = 0; h < heads; ++h) {
      // The published slopes: 2^(-8 (h + 1) / n), then odd multiples of half that step.
      const auto n = static_cast<double>(power);
      const double step = h < power ? 8.0 * static_cast<double>(h + 1) / n
                                    : 4.0 * static_cast<double>(2 * (h - power) + 1) / n;
      const bool again = p.slopes_stride == 0 && b > 0;
      out.slopes.push_back(p.alibi == TEA_ALIBI_STANDARD ? std::exp2(-step)
                           : again                       ? out.slopes[static_cast<size_t>(h)]
                                                         : as_stored(random.normal()));
    }
}

}  // namespace

oracle::Type oracle_type(int32_t dtype) {
  using oracle::Type;
  constexpr Type kTypes[] = {Type::kExact, Type::kFp16, Type::kBf16, Type::kFp32,
                             Type::kFp64,  Type::kE4m3, Type::kE5m2};
  return kTypes[dtype];
}

Scalars scalars(const Case& c) {
  if (c.scales == Scales::kNone) return {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0};
  const bool own = c.scales == Scales::kOwn;
  const double q = 0.5, dq = 2;
  return {q,
          own ? 0.375 : q,
          own ? 1.25 : q,
          192,
          static_cast<double>(1.0f / 192),
          16,
          0.0625,
          0.5,
          24,
          static_cast<double>(1.0f / 24),
          dq,
          own ? 4 : dq,
          own ? 0.75 : dq,
          0.125};
}

oracle::Case make_logical(const Case& c, const Problem& p, const Extents& e) {
  oracle::Case out;
  out.batch = e.batch, out.heads_q = p.heads_q, out.heads_kv = p.heads_kv;
  out.dim_qk = p.dim_qk, out.dim_v = p.v_dim(), out.max_q = e.max_q, out.max_kv = e.max_kv;
  out.length_q = e.len_q, out.length_kv = e.len_kv;
  make_options(c, p, out);
  const auto places_of = places(c, p, e);
  const auto dtype = [&](tea_tensor t) { return places_of[t].dtype; };
  const Index q = {e.batch, p.heads_q, e.max_q, p.dim_qk};
  const Index k = {e.batch, p.heads_kv, e.max_kv, p.dim_qk};
  const Index v = {e.batch, p.heads_kv, e.max_kv, out.dim_v};
  out.q = rows(c, p, TEA_Q, dtype(TEA_Q), q);
  out.k = rows(c, p, TEA_K, dtype(TEA_K), k);
  out.v = rows(c, p, TEA_V, dtype(TEA_V), v);
  if (p.training)
    out.dout = rows(c, p, TEA_DOUT, dtype(TEA_DOUT), {e.batch, p.heads_q, e.max_q, out.dim_v});
  if (places_of[TEA_DLSE].used)
    out.dlse = rows(c, p, TEA_DLSE, TEA_FP32, {e.batch, p.heads_q, e.max_q, 1});
  make_vectors(c, p, out);
  if (p.bias) {
    out.bias.resize(static_cast<size_t>(e.batch * p.heads_q * e.max_q * e.max_kv));
    fill_bias(c, dtype(TEA_BIAS), out);
  }
  if (c.values == Values::kNanMasked) poison_masked(c, dtype(TEA_K), out);
  if (c.values == Values::kNanAttended) poison_attended(out);
  return out;
}

}  // namespace tea::kit
