// Random Cases for the oracle's own tests: any combination of options, and inputs that are mild or
// hostile. What lies past a length is NaN.
#pragma once
#include <cmath>
#include <random>
#include <vector>

#include "kit/bounds.h"

namespace tea::oracle {

enum class Inputs { kNormal, kLargeLogits, kOneHot, kConstant, kOutliers, kTiny, kHuge };

class Draws {
 public:
  explicit Draws(uint64_t seed) : random_(seed) {}

  int64_t below(int64_t n) { return std::uniform_int_distribution<int64_t>(0, n - 1)(random_); }
  bool coin() { return below(2) == 1; }
  double normal() { return std::normal_distribution<double>()(random_); }
  double uniform(double low, double high) {
    return std::uniform_real_distribution<double>(low, high)(random_);
  }

  // Sequences of at most `longest`, every option on or off at random, all arrays rounded to `type`.
  Case draw(int64_t longest, Inputs inputs, Type type) {
    Case c;
    c.batch = 1 + below(2);
    c.heads_kv = 1 + below(2);
    c.heads_q = c.heads_kv * (1 + below(3));
    c.dim_qk = 8 * (1 + below(2 + longest / 8));
    c.dim_v = 8 * (1 + below(2 + longest / 8));
    c.max_q = 1 + below(longest);
    c.max_kv = 1 + below(longest);
    for (int64_t b = 0; b < c.batch; ++b) {
      c.length_q.push_back(coin() ? c.max_q : below(c.max_q + 1));
      c.length_kv.push_back(coin() ? c.max_kv : below(c.max_kv + 1));
    }
    options(c);
    fill(c, inputs, type);
    return c;
  }

  // Every array of a case whose sizes and options stand.
  void fill(Case& c, Inputs inputs, Type type) {
    const auto rows = [&](int64_t heads, int64_t length, int64_t dim) {
      return std::vector<double>(c.batch * heads * length * dim);
    };
    const auto value = [&](std::vector<double>& x) {
      for (double& element : x) element = nearest(normal(), rounding(type));
    };
    c.q = rows(c.heads_q, c.max_q, c.dim_qk), c.dout = rows(c.heads_q, c.max_q, c.dim_v);
    c.k = rows(c.heads_kv, c.max_kv, c.dim_qk), c.v = rows(c.heads_kv, c.max_kv, c.dim_v);
    for (std::vector<double>* x : {&c.q, &c.k, &c.v, &c.dout}) value(*x);
    if (c.bias_kind != Bias::kNone) value(c.bias = rows(c.heads_q, c.max_q, c.max_kv));
    if (coin()) value(c.dlse = rows(c.heads_q, c.max_q, 1));
    distort(c, inputs, type);
    bury(c);
    if (rounding(type).saturates) scales(c, type);
  }

 private:
  void scales(Case& c, Type type) {
    c.fp8.s = type;
    c.fp8.dp = coin() ? Type::kE5m2 : type;
    const auto scale = [this] { return static_cast<float>(std::exp2(uniform(-2, 4))); };
    for (double* x : {&c.fp8.s_scale, &c.fp8.dp_scale, &c.fp8.o_scale, &c.fp8.dq_scale,
                      &c.fp8.dk_scale, &c.fp8.dv_scale})
      *x = scale();
    c.fp8.s_scale_inv = static_cast<float>(1 / c.fp8.s_scale);
    c.fp8.dp_scale_inv = static_cast<float>(1 / c.fp8.dp_scale);
    for (double* x : {&c.fp8.q_scale_inv, &c.fp8.k_scale_inv, &c.fp8.v_scale_inv,
                      &c.fp8.o_scale_inv, &c.fp8.dout_scale_inv})
      *x = 1 / scale();
    c.o_stored = c.dout;  // any values will do
    for (double& x : c.o_stored) x = -x / 2;
  }

  void options(Case& c) {
    c.scale = uniform(0.5, 1.5) / std::sqrt(static_cast<double>(c.dim_qk));
    c.causal = coin();
    c.bottom_right = coin();
    if (coin()) c.window_left = below(c.max_kv);
    if (coin()) c.window_right = below(c.max_kv);
    c.bias_kind = static_cast<Bias>(below(3));
    if (coin())
      for (int64_t n = c.batch * c.heads_q; n > 0; --n) c.slopes.push_back(std::exp2(-below(6)));
    if (coin())
      for (int64_t n = c.heads_q; n > 0; --n)
        c.sink.push_back(nearest(2 * normal(), rounding(Type::kFp32)));
    if (coin()) c.softcap = static_cast<double>(1 + below(20));
    if (coin()) c.dropout = static_cast<double>(1 + below(8)) / 10;
    c.seed = random_();
    c.offset = random_();
    for (int64_t& origin : c.origin) origin = coin() ? 0 : below(4);
  }

  void distort(Case& c, Inputs inputs, Type type) {
    const Rounding r = rounding(type);
    // A random logit has a deviation of about scale * sqrt(dim) * (size of q) * (size of k).
    if (inputs == Inputs::kLargeLogits)
      for (double& x : c.q) x = nearest(x * 300, r);
    if (inputs == Inputs::kConstant) {
      const double constant = nearest(uniform(0.5, 2), r);
      for (std::vector<double>* x : {&c.q, &c.k, &c.v, &c.dout})
        for (double& element : *x) element = constant;
    }
    // Around the smallest numbers, and as large as the products of an fp32 engine allow.
    if (inputs == Inputs::kTiny || inputs == Inputs::kHuge) {
      const double size = inputs == Inputs::kHuge ? std::min(1e17, r.largest / 64)
                                                  : std::max(32 * r.floor, 0x1p-130);
      for (std::vector<double>* x : {&c.q, &c.k, &c.v, &c.dout})
        for (double& element : *x) element = nearest(element * size, r);
    }
    if (inputs == Inputs::kOneHot)
      for (size_t i = 0; i < c.q.size(); ++i)
        c.q[i] = i % c.dim_qk == i / c.dim_qk % c.dim_qk ? nearest(100, r) : 0;
    if (inputs == Inputs::kOutliers)
      for (std::vector<double>* x : {&c.q, &c.k, &c.v, &c.dout})
        for (double& element : *x)
          if (below(50) == 0) element = nearest(element * 1e3, r);
  }

  // Overwrites what lies past the lengths.
  static void bury(Case& c) {
    const auto past = [&c](std::vector<double>& x, const std::vector<int64_t>& length,
                           int64_t heads, int64_t rows) {
      const int64_t dim = x.empty() ? 0 : static_cast<int64_t>(x.size()) / (c.batch * heads * rows);
      for (size_t i = 0; i < x.size(); ++i) {
        const int64_t row = static_cast<int64_t>(i) / dim;
        if (row % rows >= length[row / (heads * rows)]) x[i] = NAN;
      }
    };
    for (std::vector<double>* x : {&c.q, &c.dout, &c.dlse, &c.bias})
      past(*x, c.length_q, c.heads_q, c.max_q);
    for (std::vector<double>* x : {&c.k, &c.v}) past(*x, c.length_kv, c.heads_kv, c.max_kv);
    for (size_t i = 0; i < c.bias.size(); ++i) {
      const int64_t row = static_cast<int64_t>(i) / c.max_kv, col = i % c.max_kv;
      if (col >= c.length_kv[row / (c.heads_q * c.max_q)]) c.bias[i] = NAN;
    }
  }

  std::mt19937_64 random_;
};

}  // namespace tea::oracle
