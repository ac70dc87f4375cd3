// The oracle's forward pass, row by row. Each quantity is an Approx, so that the error of an engine
// that computes it in lower precision is carried along step by step.
#include "kit/oracle.h"

#include <algorithm>
#include <cfloat>
#include <cmath>

#include "kit/oracle_solver.h"

namespace tea::oracle {
namespace {
Tensor zeros(int64_t n, double value = 0) {
  return {std::vector<double>(n, value), std::vector<double>(n, 0.0), rounding(Type::kFp32)};
}
}  // namespace

using std::abs;

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

Result solve(const Case& c, const Precision& precision) { return Solver(c, precision).solve(); }

}  // namespace tea::oracle
