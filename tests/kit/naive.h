// A deliberately plain engine to try the oracle's bounds on: one thread, arithmetic in Real, P and
// dS rounded before the second products, keys in tiles with a running maximum. It can be configured
// to make one mistake, which the bounds must then reveal.
#pragma once
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "kit/bounds.h"

namespace tea::oracle {

enum class Mistake {
  kNone,
  kNoRescale,         // a new maximum leaves the accumulators as they are
  kLastKeyTwice,      // a tile overlaps the next one
  kNoKeepScale,       // dropout without 1 / (1 - p)
  kNoDropInBackward,  // of dP; dV has it
  kNoDelta,
  kNoCapSlope,  // backward as if there were no softcap
  kNoSinkGradient,
  kOtherDbias  // the gradient before the scale for the one after it, or the reverse
};
inline constexpr Mistake kMistakes[] = {Mistake::kNoRescale,      Mistake::kLastKeyTwice,
                                        Mistake::kNoKeepScale,    Mistake::kNoDropInBackward,
                                        Mistake::kNoDelta,        Mistake::kNoCapSlope,
                                        Mistake::kNoSinkGradient, Mistake::kOtherDbias};

template <class Real>
class Naive {
 public:
  Naive(const Case& c, const Precision& precision, Mistake mistake = Mistake::kNone)
      : c_(c), p_(precision), mistake_(mistake), fp8_(c.fp8.s != Type::kExact) {
    const auto size = [&c](int64_t heads, int64_t length, int64_t dim) {
      return static_cast<size_t>(c.batch * heads * length * dim);
    };
    out.o.value.resize(size(c.heads_q, c.max_q, c.dim_v));
    out.lse.value.assign(size(c.heads_q, c.max_q, 1), -kInfinity);
    out.max.value = out.lse.value;
    out.sum_exp.value.resize(size(c.heads_q, c.max_q, 1));
    out.dq.value.resize(size(c.heads_q, c.max_q, c.dim_qk));
    out.dsink.value.resize(c.sink.size());
    out.dbias.value.resize(c.bias.size());
    for (Tensor* amax :
         {&out.s_amax, &out.o_amax, &out.dp_amax, &out.dq_amax, &out.dk_amax, &out.dv_amax})
      amax->value = {0};
    dk_.resize(size(c.heads_kv, c.max_kv, c.dim_qk));
    dv_.resize(size(c.heads_kv, c.max_kv, c.dim_v));
    run();
  }

  Result out;  // only the values

 private:
  struct Score {
    Real x, cap_slope;
  };

  Real keep(int64_t j) const {
    if (c_.dropout == 0) return 1;
    const Real kept = 1 - static_cast<Real>(c_.dropout);
    if (!keeps(c_, b_, h_, i_, j)) return 0;
    return mistake_ == Mistake::kNoKeepScale ? 1 : 1 / kept;
  }
  int64_t key(int64_t j) const { return (b_ * c_.heads_kv + c_.kv_head(h_)) * c_.max_kv + j; }
  // exp(x - y) as kernels compute it. With huge logits the rounding of the fused product alone
  // would lose the result.
  static Real exp_minus(Real x, Real y) {
    const Real log2e = static_cast<Real>(1.4426950408889634);
    return std::exp2(std::abs(y) < 4096 ? std::fma(x, log2e, -y * log2e) : (x - y) * log2e);
  }
  static Real dot(const double* a, const double* b, int64_t n) {
    Real sum = 0;
    for (int64_t d = 0; d < n; ++d) sum += static_cast<Real>(a[d]) * static_cast<Real>(b[d]);
    return sum;
  }

  Score score(int64_t j) const {
    const Real scale = static_cast<Real>(c_.scale * c_.fp8.q_scale_inv * c_.fp8.k_scale_inv *
                                         c_.k_factor(c_.kv_head(h_)));
    const Real bias = c_.bias_kind == Bias::kNone ? 0 : c_.bias[row_ * c_.max_kv + j];
    Score s{scale * dot(&c_.q[row_ * c_.dim_qk], &c_.k[key(j) * c_.dim_qk], c_.dim_qk), 1};
    if (c_.bias_kind == Bias::kPreScale) s.x += static_cast<Real>(c_.scale) * bias;
    if (c_.softcap > 0) {
      const Real cap = static_cast<Real>(c_.softcap), t = std::tanh(s.x / cap);
      s = {cap * t, mistake_ == Mistake::kNoCapSlope ? 1 : 1 - t * t};
    }
    if (c_.bias_kind == Bias::kPostScale) s.x += bias;
    if (c_.slopes.empty()) return s;
    const int64_t distance = i_ + c_.origin_of(2, b_) + c_.diagonal(b_) - j - c_.origin_of(3, b_);
    s.x -=
        static_cast<Real>(c_.slopes[b_ * c_.heads_q + h_]) * static_cast<Real>(std::abs(distance));
    return s;
  }

  // The operand of a second product, in the scale in which it is summed.
  Real operand(Real x, Type type, double scale) const {
    if (type == Type::kExact) return static_cast<Real>(nearest(x, p_.p));
    return static_cast<Real>(nearest(x * static_cast<Real>(scale), rounding(type)));
  }

  void run() {
    for (b_ = 0; b_ < c_.batch; ++b_)
      for (h_ = 0; h_ < c_.heads_q; ++h_)
        for (i_ = 0; i_ < c_.length_q[b_]; ++i_) {
          row_ = (b_ * c_.heads_q + h_) * c_.max_q + i_;
          forward();
          if (!c_.dout.empty()) backward();
        }
    const Fp8& f = c_.fp8;
    const Real dp = static_cast<Real>(f.dp_scale_inv);
    store(dk_, dp * static_cast<Real>(f.q_scale_inv), f.dk_scale, out.dk, out.dk_amax);
    store(dv_, static_cast<Real>(f.s_scale_inv * f.dout_scale_inv), f.dv_scale, out.dv,
          out.dv_amax);
  }

  static void raise(Tensor& amax, Real x) {
    amax.value[0] = std::max<double>(amax.value[0], static_cast<float>(std::abs(x)));
  }

  void store(const std::vector<Real>& from, Real factor, double scale, Tensor& to, Tensor& amax) {
    to.value.clear();
    for (const Real x : from) {
      raise(amax, x * factor);
      to.value.push_back(nearest(x * factor * static_cast<Real>(scale), p_.dqkv));
    }
  }

  void forward() {
    std::vector<Real> acc(c_.dim_v), x;
    std::vector<int64_t> cols;
    for (int64_t j = 0; j < c_.length_kv[b_]; ++j)
      if (visible(c_, b_, i_, j)) cols.push_back(j);
    if (mistake_ == Mistake::kLastKeyTwice && !cols.empty()) cols.push_back(cols.back());
    for (const int64_t j : cols) x.push_back(score(j).x);
    constexpr size_t kTile = 16;
    Real max = -kInfinity, sum = 0;
    // FP8 casts against the final maximum unless the precision allows for a running one.
    if (fp8_ && p_.p.unit == 0 && mistake_ != Mistake::kNoRescale)
      for (const Real value : x) max = std::max(max, value);
    for (size_t begin = 0; begin < x.size(); begin += kTile) {
      const size_t end = std::min(begin + kTile, x.size());
      const Real before = max;
      for (size_t n = begin; n < end; ++n) max = std::max(max, x[n]);
      const Real rescale =
          before == max || mistake_ == Mistake::kNoRescale ? 1 : exp_minus(before, max);
      sum *= rescale;
      for (Real& a : acc) a *= rescale;
      for (size_t n = begin; n < end; ++n) {
        const Real e = exp_minus(x[n], max);
        sum += e;
        raise(out.s_amax, e * keep(cols[n]));
        add(operand(e * keep(cols[n]), c_.fp8.s, c_.fp8.s_scale), &c_.v[key(cols[n]) * c_.dim_v],
            acc);
      }
    }
    normalise(acc, max, sum);
  }

  void add(Real a, const double* x, std::vector<Real>& sum) const {
    for (size_t d = 0; d < sum.size(); ++d) {
      sum[d] += a * static_cast<Real>(x[d]);
    }
  }

  void normalise(const std::vector<Real>& acc, Real max, Real sum) {
    const Real sink = c_.sink.empty() ? -kInfinity : c_.sink[h_], top = std::max(max, sink);
    if (max > -kInfinity) {
      const Real z = sum * exp_minus(max, top) + exp_minus(sink, top);
      const Real norm = exp_minus(max, top) / z *
                        static_cast<Real>(c_.fp8.v_scale_inv * c_.v_factor(c_.kv_head(h_)) *
                                          (fp8_ ? c_.fp8.s_scale_inv : 1));
      for (int64_t d = 0; d < c_.dim_v; ++d) {
        const Real o = acc[d] * norm;
        raise(out.o_amax, o);
        out.o.value[row_ * c_.dim_v + d] = nearest(o * static_cast<Real>(c_.fp8.o_scale), p_.o);
      }
      out.lse.value[row_] = nearest(top + std::log(z), p_.statistic);
      out.sum_exp.value[row_] = nearest(z * exp_minus(top, max), p_.statistic);
    } else {
      out.lse.value[row_] = sink;
    }
    out.max.value[row_] = nearest(max, p_.statistic);
  }

  void backward() {
    const Real lse = out.lse.value[row_];
    if (lse == -kInfinity) return;
    const double* dout = &c_.dout[row_ * c_.dim_v];
    const bool stored = !c_.o_stored.empty();
    const double* o = stored ? &c_.o_stored[row_ * c_.dim_v] : &out.o.value[row_ * c_.dim_v];
    Real shift = -dot(dout, o, c_.dim_v) *
                 static_cast<Real>(c_.fp8.dout_scale_inv * (stored ? c_.fp8.o_scale_inv : 1));
    if (out.max.value[row_] == -kInfinity || mistake_ == Mistake::kNoDelta) shift = 0;
    if (!c_.dlse.empty()) shift += static_cast<Real>(c_.dlse[row_]);
    if (!c_.sink.empty()) {
      const Real p = exp_minus(c_.sink[h_], lse);
      if (mistake_ != Mistake::kNoSinkGradient)
        out.dsink.value[h_] = static_cast<Real>(out.dsink.value[h_] + p * shift);
    }
    std::vector<Real> dq(c_.dim_qk);
    for (int64_t j = 0; j < c_.length_kv[b_]; ++j)
      if (visible(c_, b_, i_, j)) pair(j, lse, shift, dq);
    Tensor row;
    store(dq, static_cast<Real>(c_.fp8.dp_scale_inv * c_.fp8.k_scale_inv), c_.fp8.dq_scale, row,
          out.dq_amax);
    std::ranges::copy(row.value, &out.dq.value[row_ * c_.dim_qk]);
  }

  void pair(int64_t j, Real lse, Real shift, std::vector<Real>& dq) {
    const Fp8& f = c_.fp8;
    const Score s = score(j);
    const Real p = exp_minus(s.x, lse), kept = keep(j), scale = static_cast<Real>(c_.scale);
    const double* dout = &c_.dout[row_ * c_.dim_v];
    accumulate_row(operand(p * kept, f.s, f.s_scale), dout, c_.dim_v, dv_, key(j));
    const Real dp = dot(dout, &c_.v[key(j) * c_.dim_v], c_.dim_v) *
                    static_cast<Real>(f.dout_scale_inv * f.v_scale_inv);
    const Real ds = p * ((mistake_ == Mistake::kNoDropInBackward ? 1 : kept) * dp + shift);
    const Real g = ds * s.cap_slope * scale;
    const bool scaled = (c_.bias_kind == Bias::kPreScale) != (mistake_ == Mistake::kOtherDbias);
    if (!c_.bias.empty())
      out.dbias.value[row_ * c_.max_kv + j] = nearest(scaled ? g : ds, p_.dbias);
    raise(out.dp_amax, g);
    const Real w = operand(g, f.dp, f.dp_scale);
    add(w, &c_.k[key(j) * c_.dim_qk], dq);
    accumulate_row(w, &c_.q[row_ * c_.dim_qk], c_.dim_qk, dk_, key(j));
  }

  static void accumulate_row(Real a, const double* x, int64_t n, std::vector<Real>& to,
                             int64_t at) {
    for (int64_t d = 0; d < n; ++d) to[at * n + d] += a * static_cast<Real>(x[d]);
  }

  const Case& c_;
  const Precision p_;
  const Mistake mistake_;
  const bool fp8_;
  int64_t b_, h_, i_, row_;
  std::vector<Real> dk_, dv_;
};

}  // namespace tea::oracle
