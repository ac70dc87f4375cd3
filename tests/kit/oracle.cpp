// The oracle's forward and backward, row by row. Each quantity is an Approx, so that the error of
// an engine that computes it in lower precision is carried along step by step.
#include "kit/oracle.h"

#include <algorithm>
#include <cfloat>
#include <cmath>

#include "kit/approx.h"

namespace tea::oracle {
namespace {
using std::abs;

Tensor zeros(int64_t n, double value = 0) {
  return {std::vector<double>(n, value), std::vector<double>(n, 0.0), rounding(Type::kFp32)};
}

// One visible (row, column).
struct Pair {
  int64_t col, kv;   // the column; the flat index of its key and value
  double keep;       // 0 or 1 / (1 - p)
  Approx x, bend;    // the score; the slope of the softcap
  double log_error;  // of exp(x - maximum)
};

class Solver {
 public:
  Solver(const Case& c, const Precision& p)
      : c_(c), p_(p), u_(p.unit_acc), flush_(u_ < 1e-12 ? DBL_MIN : FLT_MIN) {}
  Result solve();

 private:
  Approx dot(const double* a, const double* b, int64_t n, double factor) const;
  void bend(Pair& pair) const;
  void scores();
  void softmax();
  void output();
  void gradients();
  void pair_gradients(const Pair& pair, Approx shift);
  void allocate();
  Tensor store(Tensor& t, double factor, double scale, const Rounding& type) const;
  Tensor amax(const Peak& peak) const;

  // Of P and dS, which an engine may round before or after it multiplies them by `factor`.
  Rounding rounding_of_p(double factor, Type fp8 = Type::kExact) const {
    Rounding r = fp8 == Type::kExact ? p_.p : Rounding{};
    r.floor *= factor;
    return r;
  }

  const Case& c_;
  const Precision& p_;
  const double u_, flush_;  // flush_: an engine may treat smaller numbers as zero
  Result r_;
  Peak s_amax_{0}, dp_amax_{0};
  int64_t b_, h_, i_, row_;  // the row at hand, and its flat index
  std::vector<Pair> pairs_;
  double lse_, max_, max_error_, z_error_;  // z_error_: relative, of the denominator
};

// Rounding each partial sum, none larger than the sum of magnitudes, costs n units at worst; half
// of it here, since a check allows twice the bound.
Approx Solver::dot(const double* a, const double* b, int64_t n, double factor) const {
  double sum = 0, size = 0, lost = 0;
  for (int64_t d = 0; d < n; ++d) {
    const double product = a[d] * b[d];
    sum += product;
    size += abs(product);
    if (std::min(abs(a[d]), abs(b[d])) < p_.least) lost += abs(product);
  }
  const double terms = static_cast<double>(n);
  return {factor * sum, abs(factor) * (size * u_ * (terms / 2 + 4) + terms * flush_ + lost)};
}

// Softcap by its extremes over the error, which may exceed the range where it is linear. tanh by
// way of exp is good to a few units of 1, not of itself.
void Solver::bend(Pair& pair) const {
  const double cap = c_.softcap, x = pair.x.value, e = pair.x.error;
  const auto t = [cap](double s) { return std::tanh(s / cap); };
  const auto slope = [t](double s) { return 1 - t(s) * t(s); };
  const double up = t(x + e) - t(x), down = t(x) - t(x - e);
  pair.x = {cap * t(x), cap * (std::max(up, down) + 4 * u_)};
  const double ends = std::max(abs(slope(x + e) - slope(x)), abs(slope(x - e) - slope(x)));
  pair.bend = {slope(x), std::max(ends, abs(x) < e ? 1 - slope(x) : 0) + 12 * u_};
}

void Solver::scores() {
  pairs_.clear();
  const int64_t group = h_ / (c_.heads_q / c_.heads_kv);
  const int64_t delta = c_.bottom_right ? c_.length_kv[b_] - c_.length_q[b_] : 0;
  const double p = static_cast<float>(c_.dropout);
  for (int64_t j = 0; j < c_.length_kv[b_]; ++j) {
    if (!visible(c_, b_, i_, j)) continue;
    Pair pair{j, (b_ * c_.heads_kv + group) * c_.max_kv + j, 1, {}, {1, 0}, 0};
    if (p > 0) pair.keep = keeps(c_, b_, h_, i_, j) ? 1 / (1 - p) : 0;
    Approx& x = pair.x;
    x = dot(&c_.q[row_ * c_.dim_qk], &c_.k[pair.kv * c_.dim_qk], c_.dim_qk,
            c_.scale * c_.fp8.q_scale_inv * c_.fp8.k_scale_inv);
    const auto add = [&x, this](double term) {
      x.value += term;
      x.error += u_ * (2 * abs(term) + abs(x.value));
      if (std::isinf(x.value)) x.error = 0;
    };
    if (c_.bias_kind == Bias::kPreScale) add(c_.scale * c_.bias[row_ * c_.max_kv + j]);
    if (c_.softcap > 0) bend(pair);
    if (c_.bias_kind == Bias::kPostScale) add(c_.bias[row_ * c_.max_kv + j]);
    if (!c_.slopes.empty()) {
      const int64_t distance = i_ + c_.origin[2] + delta - j - c_.origin[3];
      add(-c_.slopes[b_ * c_.heads_q + h_] * static_cast<double>(abs(distance)));
    }
    pairs_.push_back(pair);
  }
}

// LSE, MAX and SUM_EXP of the row. The error of log(Z) is at most log1p of the upward error of Z;
// by Jensen's inequality that holds downwards too.
void Solver::softmax() {
  Peak peak{-kInfinity};
  bool poisoned = false;
  for (const Pair& pair : pairs_) {
    peak.add(pair.x);
    poisoned |= std::isnan(pair.x.value);
  }
  const double sink = c_.sink.empty() ? -kInfinity : c_.sink[h_];
  r_.max.value[row_] = max_ = poisoned ? NAN : peak.value;
  r_.lse.value[row_] = lse_ = sink;
  if (max_ == -kInfinity) return pairs_.clear();
  const double top = std::max(max_, sink);
  double sum = std::exp(sink - top);
  for (const Pair& pair : pairs_) sum += std::exp(pair.x.value - top);
  r_.lse.value[row_] = lse_ = top + std::log(sum);

  const auto log_error = [this](Approx x) {
    return std::isinf(x.value) ? 0 : x.error + u_ * (2 * abs(x.value) + 2 * abs(max_) + 4);
  };
  z_error_ = exp_error(sink - lse_, log_error({sink, 0}));
  for (Pair& pair : pairs_) {
    pair.log_error = log_error(pair.x);
    z_error_ += exp_error(pair.x.value - lse_, pair.log_error);
  }
  z_error_ += u_ * (static_cast<double>(pairs_.size()) + 8);
  max_error_ = std::isfinite(max_) ? peak.error() : kInfinity;
  const double unit = r_.lse.type.unit, far = z_error_ > 1 ? max_error_ : 0;
  r_.lse.bound[row_] =
      std::log1p(z_error_) + far + u_ * (abs(max_) + abs(lse_) + 8) + unit * abs(lse_) + FLT_MIN;
  r_.max.bound[row_] = max_error_ + unit * abs(max_) + FLT_MIN;
  const double ratio = std::exp(lse_ - max_), both = r_.lse.bound[row_] + r_.max.bound[row_];
  r_.sum_exp.value[row_] = ratio;
  r_.sum_exp.bound[row_] = exp_error(lse_ - max_, both) + (unit + 4 * u_) * ratio;
}

void Solver::output() {
  const Fp8& f = c_.fp8;
  const bool fp8 = f.s != Type::kExact;
  const double roundings = u_ * (static_cast<double>(pairs_.size()) + 8);
  // FP8 casts before the division by the denominator, everything else may as well be after it.
  const double reference = fp8 ? max_ : lse_, shift = fp8 ? max_error_ : 0;
  const double norm = f.v_scale_inv * (fp8 ? f.s_scale_inv / std::exp(lse_ - max_) : 1);
  for (const Pair& pair : pairs_) {
    const double e = std::exp(pair.x.value - reference);
    const double unsure = exp_error(pair.x.value - reference, pair.log_error + shift) +
                          (fp8 ? 0 : e * z_error_) + flush_;
    const Approx weight{pair.keep * e, pair.keep * std::min(1.0, unsure)};
    if (fp8) s_amax_.add(weight);
    Approx y = operand(weight, f.s, f.s_scale, rounding_of_p(pair.keep));
    if (fp8) y.error += (z_error_ + exp_error(0, shift)) * y.value;
    accumulate({y.value * norm, y.error * abs(norm)}, roundings, &c_.v[pair.kv * c_.dim_v],
               c_.dim_v, r_.o, row_ * c_.dim_v, p_.least);
  }
}

// dS = P * (keep * dP - delta + dlse), where delta = sum of dO * O. `shift` is dlse - delta.
void Solver::gradients() {
  const double* dout = &c_.dout[row_ * c_.dim_v];
  Approx shift{c_.dlse.empty() ? 0 : c_.dlse[row_], 0};
  double error = u_ * abs(shift.value), size = 0;
  const bool stored = !c_.o_stored.empty();
  const double factor = c_.fp8.dout_scale_inv * (stored ? c_.fp8.o_scale_inv : 1);
  for (int64_t n = row_ * c_.dim_v, d = 0; d < c_.dim_v; ++d) {
    const double o = stored ? c_.o_stored[n + d] : r_.o.value[n + d];
    if (!pairs_.empty()) shift.value -= factor * dout[d] * o;
    size += abs(factor * dout[d] * o);
    if (!stored)
      error += abs(factor * dout[d]) *
               (r_.o.bound[n + d] + p_.o.unit * abs(o) + p_.o.floor / c_.fp8.o_scale);
  }
  if (pairs_.empty()) error = size = 0;
  shift.error = error + u_ * (static_cast<double>(c_.dim_v) / 2 + 4) * size;
  for (const Pair& pair : pairs_) pair_gradients(pair, shift);
  if (c_.sink.empty() || lse_ == -kInfinity) return;
  const double p = std::exp(c_.sink[h_] - lse_);
  const double off = r_.lse.bound[row_] + u_ * (abs(c_.sink[h_]) + abs(lse_) + 4);
  const double unsure = p > 0 ? exp_error(c_.sink[h_] - lse_, off) : 0;
  const double rows = static_cast<double>(c_.batch * c_.max_q) / 2 + 4;
  r_.dsink.value[h_] += p * shift.value;
  const double flushed = p < p_.least ? p : 0;
  r_.dsink.bound[h_] +=
      (p + unsure) * shift.error + abs(shift.value) * (unsure + flushed + p * rows * u_);
}

void Solver::pair_gradients(const Pair& pair, Approx shift) {
  const Fp8& f = c_.fp8;
  const double p = std::exp(pair.x.value - lse_), keep = pair.keep;
  const double off = pair.log_error + r_.lse.bound[row_] + u_ * abs(lse_);
  const double dp = exp_error(pair.x.value - lse_, off) + flush_;
  const double *v = &c_.v[pair.kv * c_.dim_v], *dout = &c_.dout[row_ * c_.dim_v];
  const double rows =
      u_ * (static_cast<double>(c_.length_q[b_] * (c_.heads_q / c_.heads_kv)) / 2 + 8);
  const double cols = u_ * (static_cast<double>(pairs_.size()) / 2 + 8);
  // Such a P may be infinite in the engine, which not even a zero factor makes small.
  const double blown = dp > FLT_MAX ? dp : 0;
  if (keep == 0 && std::isnan(p)) {  // dropping may multiply by zero or leave out
    std::fill_n(&r_.dv.bound[pair.kv * c_.dim_v], c_.dim_v, kInfinity);
  } else {
    const Approx kept{keep * p, std::max(keep * dp, blown)};
    accumulate(operand(kept, f.s, f.s_scale, rounding_of_p(keep, f.s)), rows, dout, c_.dim_v, r_.dv,
               pair.kv * c_.dim_v, p_.least);
  }

  const Approx a = dot(dout, v, c_.dim_v, keep * f.dout_scale_inv * f.v_scale_inv);
  const double t = a.value + shift.value;
  const double te = a.error + shift.error + 2 * u_ * (abs(a.value) + abs(shift.value));
  const double unsure = dp * (abs(t) + te) + 2 * u_ * abs(p * t) + flush_;
  const Approx after{p * t, p * te + std::max(unsure, blown)};
  const Approx before{after.value * pair.bend.value,
                      after.error * (abs(pair.bend.value) + pair.bend.error) +
                          abs(after.value) * (pair.bend.error + u_)};
  const Approx g{c_.scale * before.value,
                 abs(c_.scale) * (before.error + 2 * u_ * abs(before.value))};
  if (c_.bias_kind != Bias::kNone) {
    const Approx& dbias = c_.bias_kind == Bias::kPostScale ? after : g;
    r_.dbias.value[row_ * c_.max_kv + pair.col] = dbias.value;
    r_.dbias.bound[row_ * c_.max_kv + pair.col] = dbias.error;
  }
  dp_amax_.add({abs(g.value), g.error});
  const Approx w = operand(g, f.dp, f.dp_scale, rounding_of_p(std::max(1.0, abs(c_.scale)), f.dp));
  accumulate(w, cols, &c_.k[pair.kv * c_.dim_qk], c_.dim_qk, r_.dq, row_ * c_.dim_qk, p_.least);
  accumulate(w, rows, &c_.q[row_ * c_.dim_qk], c_.dim_qk, r_.dk, pair.kv * c_.dim_qk, p_.least);
  if (std::max(abs(g.value), abs(before.value)) < p_.p.largest) return;
  std::fill_n(&r_.dq.bound[row_ * c_.dim_qk], c_.dim_qk, kInfinity);
  std::fill_n(&r_.dk.bound[pair.kv * c_.dim_qk], c_.dim_qk, kInfinity);
}

Tensor Solver::amax(const Peak& peak) const {
  const double unit = rounding(Type::kFp32).unit;
  return {{peak.value}, {peak.error() + unit * peak.value + FLT_MIN}, rounding(Type::kFp32)};
}

// Turns accumulated sums into what the engine stores: applies the factor that every term shares,
// the output's scale and its rounding. Returns the largest magnitude before scale.
Tensor Solver::store(Tensor& t, double factor, double scale, const Rounding& type) const {
  Peak peak{0};
  t.type = type;
  for (size_t i = 0; i < t.value.size(); ++i) {
    double &value = t.value[i], &bound = t.bound[i];
    value *= factor;
    bound *= abs(factor);
    peak.add({abs(value), bound});
    value *= scale;
    if (value != 0 || bound != 0)
      bound = bound * abs(scale) + type.unit * abs(value) + std::max(type.floor, flush_);
    if (type.saturates) value = std::clamp(value, -type.largest, type.largest);
  }
  return amax(peak);
}

void Solver::allocate() {
  const int64_t rows = c_.batch * c_.heads_q * c_.max_q, keys = c_.batch * c_.heads_kv * c_.max_kv;
  r_.o = zeros(rows * c_.dim_v);
  r_.lse = zeros(rows, -kInfinity);
  r_.max = zeros(rows, -kInfinity);
  r_.sum_exp = zeros(rows);
  if (c_.dout.empty()) return;
  r_.dq = zeros(rows * c_.dim_qk);
  r_.dk = zeros(keys * c_.dim_qk);
  r_.dv = zeros(keys * c_.dim_v);
  if (!c_.sink.empty()) r_.dsink = zeros(c_.heads_q);
  if (c_.bias_kind != Bias::kNone) r_.dbias = zeros(rows * c_.max_kv);
}

Result Solver::solve() {
  allocate();
  for (b_ = 0; b_ < c_.batch; ++b_)
    for (h_ = 0; h_ < c_.heads_q; ++h_)
      for (i_ = 0; i_ < c_.length_q[b_]; ++i_) {
        row_ = (b_ * c_.heads_q + h_) * c_.max_q + i_;
        scores();
        softmax();
        output();
        if (!c_.dout.empty()) gradients();
      }
  const Fp8& f = c_.fp8;
  const double dp = f.dp_scale_inv;
  if (f.s != Type::kExact) r_.s_amax = amax(s_amax_);
  r_.o_amax = store(r_.o, 1, f.o_scale, p_.o);
  if (c_.dout.empty()) return std::move(r_);
  r_.dp_amax = amax(dp_amax_);
  r_.dq_amax = store(r_.dq, dp * f.k_scale_inv, f.dq_scale, p_.dqkv);
  r_.dk_amax = store(r_.dk, dp * f.q_scale_inv, f.dk_scale, p_.dqkv);
  r_.dv_amax = store(r_.dv, f.s_scale_inv * f.dout_scale_inv, f.dv_scale, p_.dqkv);
  store(r_.dsink, 1, 1, rounding(Type::kFp32));
  return std::move(r_);
}

}  // namespace

Result solve(const Case& c, const Precision& precision) { return Solver(c, precision).solve(); }

}  // namespace tea::oracle
