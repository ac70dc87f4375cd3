// Attention and its gradients a row of queries at a time, as docs/semantics.md has them.
#include "kit/oracle.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace tea::oracle {
namespace {

double dot(const double* a, const double* b, int64_t n) {
  return std::transform_reduce(a, a + n, b, 0.0);
}

void add(double a, const double* x, int64_t n, double* sum) {
  for (int64_t d = 0; d < n; ++d) sum[d] += a * x[d];
}

double cast(double x, Type fp8, double scale) {
  return fp8 == Type::kExact ? x : nearest(x * scale, rounding(fp8));
}

void scores(const Case& c, Row& r) {
  const int64_t group = c.kv_head(r.h), delta = c.diagonal(r.b);
  const double p = c.dropout, cap = c.softcap;
  for (int64_t j = 0; j < c.length_kv[r.b]; ++j) {
    if (!visible(c, r.b, r.i, j)) continue;
    Pair pair{.col = j, .key = (r.b * c.heads_kv + group) * c.max_kv + j};
    if (p > 0) pair.keep = keeps(c, r.b, r.h, r.i, j) ? 1 / (1 - p) : 0;
    pair.linear = c.scale * c.fp8.q_scale_inv * c.fp8.k_scale_inv * c.k_factor(group) *
                  dot(&c.q[r.at * c.dim_qk], &c.k[pair.key * c.dim_qk], c.dim_qk);
    if (c.bias_kind == Bias::kPreScale) pair.linear += c.scale * c.bias[r.at * c.max_kv + j];
    pair.x = cap > 0 ? cap * std::tanh(pair.linear / cap) : pair.linear;
    if (cap > 0) pair.slope = 1 - pair.x / cap * (pair.x / cap);
    if (c.bias_kind == Bias::kPostScale) pair.bias = c.bias[r.at * c.max_kv + j];
    const int64_t distance = r.i + c.origin_of(2, r.b) + delta - j - c.origin_of(3, r.b);
    if (!c.slopes.empty())
      pair.alibi = -c.slopes[r.b * c.heads_q + r.h] * static_cast<double>(std::abs(distance));
    pair.x += pair.bias;
    pair.x += pair.alibi;
    r.pairs.push_back(pair);
  }
}

void softmax(const Case& c, Row& r, Values& out) {
  r.max = -kInfinity;
  for (const Pair& pair : r.pairs) r.max = pair.x > r.max || std::isnan(pair.x) ? pair.x : r.max;
  r.lse = r.sink = c.sink.empty() ? -kInfinity : c.sink[r.h];
  if (r.max == -kInfinity) return r.pairs.clear();
  const double top = std::max(r.max, r.sink);
  double sum = std::exp(r.sink - top);
  for (const Pair& pair : r.pairs) sum += std::exp(pair.x - top);
  r.lse = top + std::log(sum);
  out.sum_exp[r.at] = std::exp(r.lse - r.max);
}

// FP8 casts before the division by the denominator.
void output(const Case& c, Row& r, Values& out) {
  const bool fp8 = c.fp8.s != Type::kExact;
  const double sum = fp8 ? out.sum_exp[r.at] : 1;
  const double norm = c.fp8.v_scale_inv * c.fp8.s_scale_inv * c.v_factor(c.kv_head(r.h)) / sum;
  for (Pair& pair : r.pairs) {
    pair.weight = pair.keep * std::exp(pair.x - (fp8 ? r.max : r.lse));
    pair.weight8 = cast(pair.weight, c.fp8.s, c.fp8.s_scale);
    out.s_amax = std::fmax(out.s_amax, pair.weight / (c.fp8.divided ? sum : 1));
    add(pair.weight8 * norm, &c.v[pair.key * c.dim_v], c.dim_v, &out.o[r.at * c.dim_v]);
  }
}

// O = sum of keep P V and P = exp(x - LSE), so dx = P (keep dO V - sum of dO O + dLSE). A dropped
// probability that is not a number may count as zero.
void gradients(const Case& c, Row& r, Values& out) {
  const Fp8& f = c.fp8;
  const double *dout = &c.dout[r.at * c.dim_v], *q = &c.q[r.at * c.dim_qk];
  const bool stored = !c.o_stored.empty();
  const double* o = stored ? &c.o_stored[r.at * c.dim_v] : &out.o[r.at * c.dim_v];
  r.shift = c.dlse.empty() ? 0 : c.dlse[r.at];
  if (!r.pairs.empty())
    r.shift -= f.dout_scale_inv * (stored ? f.o_scale_inv : 1) * dot(dout, o, c.dim_v);
  if (!c.sink.empty() && r.lse != -kInfinity) out.dsink[r.h] += std::exp(r.sink - r.lse) * r.shift;
  for (Pair& pair : r.pairs) {
    pair.p = std::exp(pair.x - r.lse);
    pair.kept8 = cast(pair.keep * pair.p, f.s, f.s_scale);
    if (pair.keep != 0 || !std::isnan(pair.p))
      add(pair.kept8 * f.s_scale_inv * f.dout_scale_inv, dout, c.dim_v,
          &out.dv[pair.key * c.dim_v]);
    pair.dp =
        pair.keep * f.dout_scale_inv * f.v_scale_inv * dot(dout, &c.v[pair.key * c.dim_v], c.dim_v);
    pair.ds = pair.p * (pair.dp + r.shift);
    pair.g = c.scale * (pair.ds * pair.slope);
    pair.g8 = cast(pair.g, f.dp, f.dp_scale);
    if (c.bias_kind != Bias::kNone)
      out.dbias[r.at * c.max_kv + pair.col] = c.bias_kind == Bias::kPostScale ? pair.ds : pair.g;
    out.dp_amax = std::fmax(out.dp_amax, std::abs(pair.g));
    add(pair.g8 * f.dp_scale_inv * f.k_scale_inv, &c.k[pair.key * c.dim_qk], c.dim_qk,
        &out.dq[r.at * c.dim_qk]);
    add(pair.g8 * f.dp_scale_inv * f.q_scale_inv, q, c.dim_qk, &out.dk[pair.key * c.dim_qk]);
  }
}

}  // namespace

Values attention(const Case& c, const EachRow& each) {
  const int64_t rows = c.batch * c.heads_q * c.max_q, keys = c.batch * c.heads_kv * c.max_kv;
  Values out;
  out.o.resize(rows * c.dim_v), out.sum_exp.resize(rows);
  out.lse.assign(rows, -kInfinity), out.max.assign(rows, -kInfinity);
  if (!c.dout.empty()) {
    out.dq.resize(rows * c.dim_qk), out.dk.resize(keys * c.dim_qk), out.dv.resize(keys * c.dim_v);
    out.dsink.resize(c.sink.size());
    if (c.bias_kind != Bias::kNone) out.dbias.resize(rows * c.max_kv);
  }
  for (int64_t b = 0; b < c.batch; ++b)
    for (int64_t h = 0; h < c.heads_q; ++h)
      for (int64_t i = 0; i < c.length_q[b]; ++i) {
        Row row{b, h, i, (b * c.heads_q + h) * c.max_q + i};
        scores(c, row), softmax(c, row, out), output(c, row, out);
        if (!c.dout.empty()) gradients(c, row, out);
        out.lse[row.at] = row.lse, out.max[row.at] = row.max;
        if (each) each(row, out);
      }
  return out;
}

bool visible(const Case& c, int64_t b, int64_t i, int64_t j) {
  if (i >= c.length_q[b] || j >= c.length_kv[b]) return false;
  const int64_t ahead = (j + c.origin_of(3, b)) - (i + c.origin_of(2, b)) - c.diagonal(b);
  if (c.causal && ahead > 0) return false;
  if (c.window_left >= 0 && ahead < -c.window_left) return false;
  return c.window_right < 0 || ahead <= c.window_right;
}

void philox(uint32_t (&counter)[4], uint64_t key) {
  uint32_t weyl[2] = {static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32)};
  for (int round = 0; round < 10; ++round, weyl[0] += 0x9E3779B9, weyl[1] += 0xBB67AE85) {
    const uint64_t even = uint64_t{counter[0]} * 0xD2511F53,
                   odd = uint64_t{counter[2]} * 0xCD9E8D57;
    counter[0] = static_cast<uint32_t>(odd >> 32) ^ counter[1] ^ weyl[0];
    counter[1] = static_cast<uint32_t>(odd);
    counter[2] = static_cast<uint32_t>(even >> 32) ^ counter[3] ^ weyl[1];
    counter[3] = static_cast<uint32_t>(even);
  }
}

bool keeps(const Case& c, int64_t b, int64_t h, int64_t i, int64_t j) {
  if (!c.kept.empty()) return c.kept[((b * c.heads_q + h) * c.max_q + i) * c.max_kv + j];
  const uint64_t row = i + c.origin_of(2, b), col = j + c.origin_of(3, b);
  const uint64_t stream = (b + c.origin_of(0, b)) * 4096 + h + c.origin_of(1, b);
  uint32_t words[4] = {static_cast<uint32_t>(row / 16 * 8 + row % 8),
                       static_cast<uint32_t>(col / 16 * 4 + col % 8 / 2),
                       static_cast<uint32_t>(stream), static_cast<uint32_t>(c.offset)};
  philox(words, c.seed ^ (c.offset >> 32) << 32);
  const uint64_t index = row % 16 / 8 * 4 + col % 16 / 8 * 2 + col % 2;
  const uint32_t uniform = words[index / 2] >> (index % 2 * 16) & 0xFFFF;
  return uniform >= std::round(static_cast<double>(static_cast<float>(c.dropout)) * 65536);
}

}  // namespace tea::oracle
