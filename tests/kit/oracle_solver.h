// One solution of the oracle, which walks over the rows of queries. Inside the oracle only:
// oracle.cpp has its forward pass, oracle_gradients.cpp its backward pass.
#pragma once
#include <cfloat>
#include <vector>

#include "kit/approx.h"
#include "kit/oracle.h"

namespace tea::oracle {

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

}  // namespace tea::oracle
