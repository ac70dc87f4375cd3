// How far a correct engine may be from the oracle: with every number a bound of its rounding error,
// from the precisions of the engine and the data at hand.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kit/oracle.h"

namespace tea::oracle {

// The rounding of the engine under test. The outputs lse, max, sum_exp and dsink are always fp32.
struct Precision {
  double unit_acc;  // unit roundoff of scores, exponentials and accumulators
  // Of P and dS before the second product. kExact's for an engine that keeps them. For FP8 the
  // oracle itself casts P and dS as specified, so kExact's unless the engine casts P against a
  // running row maximum; then the rounding of that FP8 type.
  Rounding p;
  Rounding o, dqkv, dbias;
  double least = 0;      // smaller operands of a product may count as zero
  Rounding statistic{};  // of LSE and the like, and of the gradient of a sink
  bool operator==(const Precision&) const = default;
};

// An engine with inputs and outputs of `type`: P as `type`, accumulation in fp32 (fp64 for fp64).
Precision precision(Type type);

// Values with the error that each may have. An element is right if it is within twice its bound:
// one share for the engine, one for the order in which it happens to sum. The bounds of padding and
// of rows that attend to nothing are zero: those elements are exact.
struct Tensor {
  std::vector<double> value, bound;
  Rounding type;  // of the stored output; says what overflow looks like

  // The error of `actual` as a multiple of the bound: right iff at most 2. A NaN that must appear
  // may appear as an infinity; where the type overflows within the bound, so may the output; and
  // where the bound exceeds the type, the value is unknown and anything is right.
  double error(size_t i, double actual) const;
  bool accepts(size_t i, double actual) const { return error(i, actual) <= 2; }
};

// A Tensor that was not asked for is empty. Shapes as those of Values; amaxes hold one value,
// s_amax only with FP8. Outputs with a scale hold the scaled value, amaxes the unscaled one.
struct Result {
  Tensor o, lse, max, sum_exp;
  Tensor dq, dk, dv, dsink;
  Tensor dbias;  // before any reduction; see reduce()
  Tensor s_amax, o_amax, dp_amax, dq_amax, dk_amax, dv_amax;
};

// The values of the oracle with their bounds.
Result solve(const Case& c, const Precision& precision);

// The gradient of a bias that lacks some of (batch, head, row, column): sums `dbias` over those and
// rounds to precision.dbias. Without any true it only adds that rounding.
Tensor reduce(const Case& c, const Tensor& dbias, const bool (&lacks)[4],
              const Precision& precision);

}  // namespace tea::oracle
