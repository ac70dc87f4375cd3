// The error bounds, row by row in parallel to the oracle: each step of oracle.cpp with the error
// that an engine in lower precision adds to it and takes over from the steps before.
#include "kit/bounds.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <functional>
#include <numeric>

#include "kit/approx.h"

namespace tea::oracle {
namespace {

using std::abs;

// Of one visible (row, column): the errors of the score, of the soft cap's slope and of the
// logarithm of exp(x - maximum).
struct PairError {
  double x = 0, slope = 0, log = 0;
};

Tensor amax(double value, const Peak& peak) {
  const double unit = rounding(Type::kFp32).unit;
  return {{value}, {peak.error() + unit * value + FLT_MIN}, rounding(Type::kFp32)};
}

class Bounds {
 public:
  Bounds(const Case& c, const Precision& p)
      : c_(c), p_(p), u_(p.unit_acc), flush_(u_ < 1e-12 ? DBL_MIN : FLT_MIN) {}
  Result solve();

 private:
  double product(const double* a, const double* b, int64_t n, double factor) const;
  void cap(const Pair& pair, PairError& error) const;
  void scores(const Row& r);
  void softmax(const Row& r, double sum_exp);
  void output(const Row& r, double sum_exp);
  double shift(const Row& r, const std::vector<double>& o) const;
  void sink(const Row& r, double shift_error);
  void gradients(const Row& r, double shift_error);
  void values(const Pair& pair, const Row& r, double p_error, double blown, double roundings);
  Tensor store(Tensor& t, double factor, double scale, const Rounding& type) const;

  // The error of rounding P and dS, which an engine may do before or after it multiplies by
  // `factor`.
  double rounding_of_p(double x, double factor) const {
    return p_.p.unit * abs(x) + p_.p.floor * factor;
  }

  const Case& c_;
  const Precision& p_;
  const double u_, flush_;  // flush_: an engine may treat smaller numbers as zero
  Result r_;
  Peak s_amax_{0}, dp_amax_{0};
  // Of the row at hand: the errors of its pairs and of its maximum, and the relative one of its
  // denominator.
  std::vector<PairError> pairs_;
  double max_error_, z_error_;
};

// Rounding each partial sum, none larger than the sum of magnitudes, costs n units at worst; half
// of it here, since a check allows twice the bound.
double Bounds::product(const double* a, const double* b, int64_t n, double factor) const {
  const double size = std::transform_reduce(a, a + n, b, 0.0, std::plus(),
                                            [](double x, double y) { return abs(x * y); });
  double lost = 0;
  for (int64_t d = 0; p_.least > 0 && d < n; ++d)
    if (std::min(abs(a[d]), abs(b[d])) < p_.least) lost += abs(a[d] * b[d]);
  const double terms = static_cast<double>(n);
  return abs(factor) * (size * u_ * (terms / 2 + 4) + terms * flush_ + lost);
}

// Softcap by its extremes over the error, which may exceed the range where it is linear. tanh by
// way of exp is good to a few units of 1, not of itself.
void Bounds::cap(const Pair& pair, PairError& error) const {
  const double x = pair.linear, e = error.x;
  const double at = std::tanh(x / c_.softcap), above = std::tanh((x + e) / c_.softcap),
               below = std::tanh((x - e) / c_.softcap);
  const double ends = std::max(abs(at * at - above * above), abs(at * at - below * below));
  error.x = c_.softcap * (std::max(above - at, at - below) + 4 * u_);
  error.slope = std::max(ends, abs(x) < e ? at * at : 0) + 12 * u_;
}

void Bounds::scores(const Row& r) {
  pairs_.clear();
  for (const Pair& pair : r.pairs) {
    PairError error;
    error.x =
        product(&c_.q[r.at * c_.dim_qk], &c_.k[pair.key * c_.dim_qk], c_.dim_qk,
                c_.scale * c_.fp8.q_scale_inv * c_.fp8.k_scale_inv * c_.k_factor(c_.kv_head(r.h)));
    const auto add = [&error, this](double term, double sum) {
      error.x += u_ * (2 * abs(term) + abs(sum));
      if (std::isinf(sum)) error.x = 0;
    };
    if (c_.bias_kind == Bias::kPreScale)
      add(c_.scale * c_.bias[r.at * c_.max_kv + pair.col], pair.linear);
    if (c_.softcap > 0) cap(pair, error);
    if (c_.bias_kind == Bias::kPostScale) add(pair.bias, pair.x - pair.alibi);
    if (!c_.slopes.empty()) add(pair.alibi, pair.x);
    pairs_.push_back(error);
  }
}

// The error of log(Z) is at most log1p of the upward error of Z; by Jensen's inequality that holds
// downwards too.
void Bounds::softmax(const Row& r, double sum_exp) {
  if (r.pairs.empty()) return;
  const auto log_error = [&r, this](double x, double error) {
    return std::isinf(x) ? 0 : error + u_ * (2 * abs(x) + 2 * abs(r.max) + 4);
  };
  Peak peak{-kInfinity};
  z_error_ = exp_error(r.sink - r.lse, log_error(r.sink, 0));
  for (size_t n = 0; n < pairs_.size(); ++n) {
    const double x = r.pairs[n].x;
    peak.add({x, pairs_[n].x});
    pairs_[n].log = log_error(x, pairs_[n].x);
    z_error_ += exp_error(x - r.lse, pairs_[n].log);
  }
  z_error_ += u_ * (static_cast<double>(pairs_.size()) + 8);
  max_error_ = std::isfinite(r.max) ? peak.error() : kInfinity;
  const double unit = p_.statistic.unit;
  const double least = unit < 1e-12 ? DBL_MIN : FLT_MIN, far = z_error_ > 1 ? max_error_ : 0;
  double &lse = r_.lse.bound[r.at], &max = r_.max.bound[r.at];
  lse = std::log1p(z_error_) + far + u_ * (abs(r.max) + abs(r.lse) + 8) + unit * abs(r.lse) + least;
  max = max_error_ + unit * abs(r.max) + least;
  r_.sum_exp.bound[r.at] = exp_error(r.lse - r.max, lse + max) + (unit + 4 * u_) * sum_exp;
}

void Bounds::output(const Row& r, double sum_exp) {
  const Fp8& f = c_.fp8;
  const bool fp8 = f.s != Type::kExact;
  const double roundings = u_ * (static_cast<double>(pairs_.size()) + 8);
  // FP8 casts before the division by the denominator, everything else may as well be after it.
  const double reference = fp8 ? r.max : r.lse, off = fp8 ? max_error_ : 0;
  const double norm =
      f.v_scale_inv * c_.v_factor(c_.kv_head(r.h)) * (fp8 ? f.s_scale_inv / sum_exp : 1);
  for (size_t n = 0; n < pairs_.size(); ++n) {
    const Pair& pair = r.pairs[n];
    const double unsure =
        pair.keep * (exp_error(pair.x - reference, pairs_[n].log + off) + flush_) +
        (fp8 ? 0 : pair.weight * z_error_);
    const Approx weight{pair.weight, std::min(pair.keep, unsure)};
    if (fp8 && f.divided)
      s_amax_.add({weight.value / sum_exp,
                   (weight.error + weight.value * (z_error_ + exp_error(0, off))) / sum_exp});
    else if (fp8)
      s_amax_.add(weight);
    double error =
        cast_error(weight, pair.weight8, f.s, f.s_scale) + rounding_of_p(pair.weight8, pair.keep);
    if (fp8) error += (z_error_ + exp_error(0, off)) * pair.weight8;
    add_error({pair.weight8 * norm, error * abs(norm)}, roundings, &c_.v[pair.key * c_.dim_v],
              c_.dim_v, p_.least, &r_.o.bound[r.at * c_.dim_v]);
  }
}

// The error of dlse - sum of dO * O.
double Bounds::shift(const Row& r, const std::vector<double>& o) const {
  if (r.pairs.empty()) return 0;
  const bool stored = !c_.o_stored.empty();
  const double factor = c_.fp8.dout_scale_inv * (stored ? c_.fp8.o_scale_inv : 1);
  double error = c_.dlse.empty() ? 0 : u_ * abs(c_.dlse[r.at]), size = 0;
  for (int64_t n = r.at * c_.dim_v; n < (r.at + 1) * c_.dim_v; ++n) {
    const double out = stored ? c_.o_stored[n] : o[n];
    size += abs(factor * c_.dout[n] * out);
    if (!stored)
      error += abs(factor * c_.dout[n]) *
               (r_.o.bound[n] + p_.o.unit * abs(out) + p_.o.floor / c_.fp8.o_scale);
  }
  return error + u_ * (static_cast<double>(c_.dim_v) / 2 + 4) * size;
}

void Bounds::sink(const Row& r, double shift_error) {
  if (c_.sink.empty() || r.lse == -kInfinity) return;
  const double p = std::exp(r.sink - r.lse);
  const double off = r_.lse.bound[r.at] + u_ * (abs(r.sink) + abs(r.lse) + 4);
  const double unsure = p > 0 ? exp_error(r.sink - r.lse, off) : 0;
  const double rows = static_cast<double>(c_.batch * c_.max_q) / 2 + 4;
  const double flushed = p < p_.least ? p : 0;
  r_.dsink.bound[r.h] +=
      (p + unsure) * shift_error + abs(r.shift) * (unsure + flushed + p * rows * u_);
}

// Of dV. A dropped P that is not a number may count as zero or spread.
void Bounds::values(const Pair& pair, const Row& r, double p_error, double blown,
                    double roundings) {
  double* const bound = &r_.dv.bound[pair.key * c_.dim_v];
  if (pair.keep == 0 && std::isnan(pair.p)) {
    std::fill_n(bound, c_.dim_v, kInfinity);
    return;
  }
  const Approx kept{pair.keep * pair.p, std::max(pair.keep * p_error, blown)};
  double error = cast_error(kept, pair.kept8, c_.fp8.s, c_.fp8.s_scale);
  if (c_.fp8.s == Type::kExact) error += rounding_of_p(pair.kept8, pair.keep);
  add_error({pair.kept8, error}, roundings, &c_.dout[r.at * c_.dim_v], c_.dim_v, p_.least, bound);
}

void Bounds::gradients(const Row& r, double shift_error) {
  const Fp8& f = c_.fp8;
  const int64_t shared = c_.heads_q / c_.heads_kv;
  const double rows = u_ * (static_cast<double>(c_.length_q[r.b] * shared) / 2 + 8);
  const double cols = u_ * (static_cast<double>(pairs_.size()) / 2 + 8);
  double* const dq = &r_.dq.bound[r.at * c_.dim_qk];
  for (size_t n = 0; n < pairs_.size(); ++n) {
    const Pair& pair = r.pairs[n];
    const double off = pairs_[n].log + r_.lse.bound[r.at] + u_ * abs(r.lse);
    const double p_error = exp_error(pair.x - r.lse, off) + flush_;
    // P may be infinite in the engine then, so that even a zero factor gives NaN.
    const double blown = p_error > FLT_MAX ? p_error : 0;
    values(pair, r, p_error, blown, rows);

    const double t = abs(pair.dp + r.shift);
    const double t_error = product(&c_.dout[r.at * c_.dim_v], &c_.v[pair.key * c_.dim_v], c_.dim_v,
                                   pair.keep * f.dout_scale_inv * f.v_scale_inv) +
                           shift_error + 2 * u_ * (abs(pair.dp) + abs(r.shift));
    const double unsure = p_error * (t + t_error) + 2 * u_ * abs(pair.ds) + flush_;
    const double ds_error = pair.p * t_error + std::max(unsure, blown);
    const double before = pair.ds * pair.slope;  // the scale
    const double before_error =
        ds_error * (abs(pair.slope) + pairs_[n].slope) + abs(pair.ds) * (pairs_[n].slope + u_);
    const Approx g{pair.g, abs(c_.scale) * (before_error + 2 * u_ * abs(before))};
    if (c_.bias_kind != Bias::kNone)
      r_.dbias.bound[r.at * c_.max_kv + pair.col] =
          c_.bias_kind == Bias::kPostScale ? ds_error : g.error;
    dp_amax_.add({abs(g.value), g.error});
    double error = cast_error(g, pair.g8, f.dp, f.dp_scale);
    if (f.dp == Type::kExact) error += rounding_of_p(pair.g8, std::max(1.0, abs(c_.scale)));
    double* const dk = &r_.dk.bound[pair.key * c_.dim_qk];
    add_error({pair.g8, error}, cols, &c_.k[pair.key * c_.dim_qk], c_.dim_qk, p_.least, dq);
    add_error({pair.g8, error}, rows, &c_.q[r.at * c_.dim_qk], c_.dim_qk, p_.least, dk);
    // dS may overflow its type within the bound. With a scale of 0 dQ and dK are 0 all the same.
    const double doubt = c_.scale == 0 ? 0 : 2 * std::max(g.error, before_error);
    if (std::max(abs(g.value), abs(before)) + doubt < p_.p.largest) continue;
    std::fill_n(dq, c_.dim_qk, kInfinity);
    std::fill_n(dk, c_.dim_qk, kInfinity);
  }
}

// Turns values and summed bounds into what the engine stores: applies to the bounds the factor that
// every term shares, then the output's scale and its rounding. Returns the largest magnitude before
// the scale.
Tensor Bounds::store(Tensor& t, double factor, double scale, const Rounding& type) const {
  Peak peak{0};
  t.type = type;
  for (size_t i = 0; i < t.value.size(); ++i) {
    double &value = t.value[i], &bound = t.bound[i];
    bound *= abs(factor);
    peak.add({abs(value), bound});
    value *= scale;
    if (value != 0 || bound != 0)
      bound = bound * abs(scale) + type.unit * abs(value) + std::max(type.floor, flush_);
    if (type.saturates) value = std::clamp(value, -type.largest, type.largest);
  }
  return amax(peak.value, peak);
}

Result Bounds::solve() {
  const auto start = [&](Tensor& t, size_t n) {
    t.bound.resize(n);
    t.type = p_.statistic;
  };
  const auto rows = static_cast<size_t>(c_.batch * c_.heads_q * c_.max_q),
             keys = static_cast<size_t>(c_.batch * c_.heads_kv * c_.max_kv);
  const auto dim = static_cast<size_t>(c_.dim_qk), dim_v = static_cast<size_t>(c_.dim_v);
  const bool backward = !c_.dout.empty();
  start(r_.o, rows * dim_v);
  for (Tensor* t : {&r_.lse, &r_.max, &r_.sum_exp}) start(*t, rows);
  start(r_.dq, backward ? rows * dim : 0);
  start(r_.dk, backward ? keys * dim : 0);
  start(r_.dv, backward ? keys * dim_v : 0);
  start(r_.dsink, backward ? c_.sink.size() : 0);
  start(r_.dbias, backward && c_.bias_kind != Bias::kNone ? rows * c_.max_kv : 0);

  Values v = attention(c_, [this, backward](const Row& row, const Values& so_far) {
    scores(row);
    softmax(row, so_far.sum_exp[row.at]);
    output(row, so_far.sum_exp[row.at]);
    if (!backward) return;
    const double shift_error = shift(row, so_far.o);
    sink(row, shift_error);
    gradients(row, shift_error);
  });
  r_.o.value = std::move(v.o), r_.lse.value = std::move(v.lse), r_.max.value = std::move(v.max);
  r_.sum_exp.value = std::move(v.sum_exp), r_.dsink.value = std::move(v.dsink);
  r_.dq.value = std::move(v.dq), r_.dk.value = std::move(v.dk), r_.dv.value = std::move(v.dv);
  r_.dbias.value = std::move(v.dbias);

  const Fp8& f = c_.fp8;
  const double dp = f.dp_scale_inv;
  if (f.s != Type::kExact) r_.s_amax = amax(v.s_amax, s_amax_);
  r_.o_amax = store(r_.o, 1, f.o_scale, p_.o);
  if (!backward) return std::move(r_);
  r_.dp_amax = amax(v.dp_amax, dp_amax_);
  r_.dq_amax = store(r_.dq, dp * f.k_scale_inv, f.dq_scale, p_.dqkv);
  r_.dk_amax = store(r_.dk, dp * f.q_scale_inv, f.dk_scale, p_.dqkv);
  r_.dv_amax = store(r_.dv, f.s_scale_inv * f.dout_scale_inv, f.dv_scale, p_.dqkv);
  store(r_.dsink, 1, 1, p_.statistic);
  return std::move(r_);
}

}  // namespace

Precision precision(Type type) {
  const bool fp8 = type == Type::kE4m3 || type == Type::kE5m2;
  const Rounding r = rounding(type), exact = rounding(Type::kExact);
  const Rounding fp32 = rounding(Type::kFp32);
  const bool fp64 = type == Type::kFp64;
  return {.unit_acc = fp64 ? 0x1p-53 : 0x1p-24,
          .p = fp8 ? exact : r,
          .o = r,
          .dqkv = r,
          .dbias = fp8 ? fp32 : r,
          .statistic = fp64 ? r : fp32};
}

double Tensor::error(size_t i, double actual) const {
  constexpr double kUnknown = 1e100;
  const double want = value[i], allowed = bound[i];
  if (std::isnan(want)) return std::isfinite(actual) ? kInfinity : 0;
  if (allowed >= std::min(type.largest, kUnknown) || actual == want) return 0;
  if (std::isinf(actual) && std::isfinite(want) && !type.saturates) {
    const double toward = std::copysign(1.0, actual) * want;
    return toward + 2 * allowed >= type.largest ? 0 : kInfinity;
  }
  const double off = std::abs(actual - want);
  return allowed > 0 && std::isfinite(off) ? off / allowed : kInfinity;
}

Tensor reduce(const Case& c, const Tensor& dbias, const bool (&lacks)[4],
              const Precision& precision) {
  const int64_t full[4] = {c.batch, c.heads_q, c.max_q, c.max_kv};
  int64_t stride[4], size = 1, terms = 1;
  for (int n = 3; n >= 0; --n) {
    stride[n] = lacks[n] ? 0 : size;
    (lacks[n] ? terms : size) *= full[n];
  }
  const double adding = precision.unit_acc * (static_cast<double>(terms) / 2 + 4);
  Tensor sum{std::vector<double>(size), std::vector<double>(size), precision.dbias};
  for (size_t i = 0; i < dbias.value.size(); ++i) {
    int64_t rest = static_cast<int64_t>(i), at = 0;
    for (int n = 3; n >= 0; rest /= full[n--]) at += rest % full[n] * stride[n];
    sum.value[at] += dbias.value[i];
    sum.bound[at] += dbias.bound[i] + adding * std::abs(dbias.value[i]);
  }
  for (size_t i = 0; i < sum.value.size(); ++i)
    if (sum.value[i] != 0 || sum.bound[i] != 0)
      sum.bound[i] += sum.type.unit * std::abs(sum.value[i]) + std::max(sum.type.floor, 0x1p-126);
  return sum;
}

Result solve(const Case& c, const Precision& precision) { return Bounds(c, precision).solve(); }

}  // namespace tea::oracle
