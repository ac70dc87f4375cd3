// The oracle: attention and its gradients in float64 from plain logical arrays, written from the
// semantics alone. It shares no code with the library, so that the two can only agree by both being
// right. bounds.h says how far an engine in lower precision may be from it.
#pragma once
#include <cstdint>
#include <functional>
#include <vector>

#include "kit/rounding.h"

namespace tea::oracle {

enum class Bias { kNone, kPreScale, kPostScale };

// FP8: q, k, v, dout and o_stored of the Case hold decoded values before their scale_inv.
struct Fp8 {
  Type s = Type::kExact;   // of P in the second products; kExact: no FP8 anywhere
  Type dp = Type::kExact;  // of scale * dS in the second products
  double s_scale = 1, s_scale_inv = 1, dp_scale = 1, dp_scale_inv = 1;
  double q_scale_inv = 1, k_scale_inv = 1, v_scale_inv = 1, o_scale_inv = 1, dout_scale_inv = 1;
  double o_scale = 1, dq_scale = 1, dk_scale = 1, dv_scale = 1;  // multiply before the output cast
  bool divided = false;  // s_amax is of P after the division by the denominator
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
  std::vector<double> k_factors,
      v_factors;  // of keys and values alone in FP8, [heads_kv]; empty: 1
  double k_factor(int64_t kv_head) const { return k_factors.empty() ? 1 : k_factors[kv_head]; }
  double v_factor(int64_t kv_head) const { return v_factors.empty() ? 1 : v_factors[kv_head]; }
  int64_t kv_head(int64_t h) const { return h / (heads_q / heads_kv); }
  double scale = 1, softcap = 0;  // softcap 0: none
  double dropout = 0;             // rounded to float, as the interface has it; 0: none
  uint64_t seed = 0, offset = 0;
  std::vector<char> kept;  // [batch][heads_q][max_q][max_kv], of another rule; empty: ours
  // Batch, head, row, column, and what is added to the diagonal; of sequence b plus b times a step.
  int64_t origin[5] = {}, origin_step[5] = {};
  int64_t origin_of(int i, int64_t b) const { return origin[i] + b * origin_step[i]; }
  int64_t diagonal(int64_t b) const {
    return origin_of(4, b) + (bottom_right ? length_kv[b] - length_q[b] : 0);
  }
  Fp8 fp8;
};

// The contribution of column j, which is visible, to row i of a sequence.
struct Pair {
  int64_t col = 0, key = 0;        // j, and the flat index of its key and value
  double keep = 1;                 // 0 or 1 / (1 - dropout)
  double linear = 0, x = 0;        // the score before the soft cap, and in the end
  double bias = 0, alibi = 0;      // what was added to it after the soft cap
  double slope = 1;                // of the soft cap
  double weight = 0, weight8 = 0;  // of the value in O, before and after the cast of FP8
  double p = 0, kept8 = 0;         // the probability, and what is dO's weight in dV
  double dp = 0, ds = 0;           // the gradients of p and of the score
  double g = 0, g8 = 0;            // that of q * k, before and after the cast of FP8
};

struct Row {
  int64_t b, h, i, at;  // at: the flat index of the row
  std::vector<Pair> pairs = {};
  double lse = 0, max = 0, sink = 0, shift = 0;  // shift: dlse - sum of dO * O
};

// Shapes as the inputs'; lse, max and sum_exp as dlse. Outputs are what they are before the scale
// and the cast of FP8; those of gradients are empty where none are wanted.
struct Values {
  std::vector<double> o, lse, max, sum_exp, dq, dk, dv, dsink;
  std::vector<double> dbias;  // [batch][heads_q][max_q][max_kv] before any reduction
  double s_amax = 0, dp_amax = 0;
};

// Calls `each` after every row, when all that the row computes is in `row` and in `so_far`.
using EachRow = std::function<void(const Row& row, const Values& so_far)>;
Values attention(const Case& c, const EachRow& each = {});

// Whether row i of sequence b sees column j, both counted from the start of the sequence.
bool visible(const Case& c, int64_t b, int64_t i, int64_t j);

// Philox4x32-10 in place, and the decision for one probability.
void philox(uint32_t (&counter)[4], uint64_t key);
bool keeps(const Case& c, int64_t b, int64_t h, int64_t i, int64_t j);

}  // namespace tea::oracle
