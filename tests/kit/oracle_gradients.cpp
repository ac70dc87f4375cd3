// The oracle's backward pass, row by row: the gradients of what oracle.cpp computes, derived by
// hand and checked by finite differences in test_oracle.cpp.
#include <algorithm>
#include <cfloat>
#include <cmath>

#include "kit/oracle_solver.h"

namespace tea::oracle {
using std::abs;

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

}  // namespace tea::oracle
