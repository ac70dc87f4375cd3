// The oracle: attention and its gradients in float64 from plain logical arrays, written from the
// semantics alone, and with every number the rounding error that a correct engine may show. It
// shares no code with the library, so that the two can only agree by both being right.
#pragma once
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

namespace tea::oracle {

// What rounding to a type costs: relative to a value, at least, and where the type ends.
struct Rounding {
  double unit = 0;   // half the distance from 1 to the next value
  double floor = 0;  // half the smallest subnormal
  double largest = std::numeric_limits<double>::infinity();
  bool saturates = false;  // beyond `largest`: true: clips; false: overflows to infinity
};

enum class Type { kExact, kFp16, kBf16, kFp32, kFp64, kE4m3, kE5m2 };
Rounding rounding(Type type);

// What the engine under test rounds. The outputs lse, max, sum_exp and dsink are always fp32.
struct Precision {
  double unit_acc;  // unit roundoff of scores, exponentials and accumulators
  // Of P and dS before the second product. kExact's for an engine that keeps them. For FP8 the
  // oracle itself casts P and dS as specified, so kExact's unless the engine casts P against a
  // running row maximum; then the rounding of that FP8 type.
  Rounding p;
  Rounding o, dqkv, dbias;
  double least = 0;  // smaller operands of a product may count as zero
};

// An engine with inputs and outputs of `type`: P as `type`, accumulation in fp32 (fp64 for fp64).
Precision precision(Type type);

enum class Bias { kNone, kPreScale, kPostScale };

// FP8: q, k, v, dout and o_stored of the Case hold decoded values before their scale_inv.
struct Fp8 {
  Type s = Type::kExact;   // of P in the second products; kExact: no FP8 anywhere
  Type dp = Type::kExact;  // of scale * dS in the second products
  double s_scale = 1, s_scale_inv = 1, dp_scale = 1, dp_scale_inv = 1;
  double q_scale_inv = 1, k_scale_inv = 1, v_scale_inv = 1, o_scale_inv = 1, dout_scale_inv = 1;
  double o_scale = 1, dq_scale = 1, dk_scale = 1, dv_scale = 1;  // multiply before the output cast
};

// One problem. Arrays are dense, in the order given; entries past a length may hold anything.
struct Case {
  int64_t batch = 1, heads_q = 1, heads_kv = 1, dim_qk = 0, dim_v = 0, max_q = 0, max_kv = 0;
  std::vector<int64_t> length_q, length_kv;  // [batch]
  std::vector<double> q;                     // [batch][heads_q][max_q][dim_qk]
  std::vector<double> k, v;                  // [batch][heads_kv][max_kv][dim_qk or dim_v]
  std::vector<double> dout;      // [batch][heads_q][max_q][dim_v]; empty: no gradients wanted
  std::vector<double> dlse;      // [batch][heads_q][max_q]; empty: zero
  std::vector<double> o_stored;  // as dout: what backward is given as o; empty: the exact o
  bool causal = false, bottom_right = false;
  int64_t window_left = -1, window_right = -1;  // inclusive; -1: no bound
  Bias bias_kind = Bias::kNone;
  std::vector<double> bias;    // [batch][heads_q][max_q][max_kv]
  std::vector<double> slopes;  // ALiBi, [batch][heads_q]; empty: none
  std::vector<double> sink;    // [heads_q]; zeros: off-by-one; empty: none
  double softcap = 0;          // 0: none
  double scale = 1;
  double dropout = 0;  // rounded to float, as the interface has it; 0: none
  uint64_t seed = 0, offset = 0;
  int64_t origin[4] = {};  // batch, head, row, column
  Fp8 fp8;
};

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

// A Tensor that was not asked for is empty. Shapes as the inputs'; max, lse, sum_exp as dlse;
// amaxes hold one value, s_amax only with FP8. Outputs with a scale hold the scaled value, amaxes
// the unscaled one.
struct Result {
  Tensor o, lse, max, sum_exp;
  Tensor dq, dk, dv, dsink;
  Tensor dbias;  // [batch][heads_q][max_q][max_kv] before any reduction; see reduce()
  Tensor s_amax, o_amax, dp_amax, dq_amax, dk_amax, dv_amax;
};

Result solve(const Case& c, const Precision& precision);

// The gradient of a bias that lacks some of (batch, head, row, column): sums `dbias` over those and
// rounds to precision.dbias. Without any true it only adds that rounding.
Tensor reduce(const Case& c, const Tensor& dbias, const bool (&lacks)[4],
              const Precision& precision);

// Whether row i of sequence b sees column j, both counted from the start of the sequence.
bool visible(const Case& c, int64_t b, int64_t i, int64_t j);

// Philox4x32-10 in place, and the decision for one probability.
void philox(uint32_t (&counter)[4], uint64_t key);
bool keeps(const Case& c, int64_t b, int64_t h, int64_t i, int64_t j);

}  // namespace tea::oracle
