// Scaled softmax on the host: rows are computed in double and rounded once. Both causal kinds are
// expressed by the number of leading columns that a row attends to.
#include "ops/softmax.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "core/problem.h"
#include "ops/on_gpu.h"
#include "ops/rows.h"

namespace tea {
namespace {

// Returns whether there is work.
bool check(const tea_scaled_softmax& a, bool forward) {
  require_dtype("dtype", a.dtype, kRealDtypes);
  TEA_REQUIRE(a.kind >= TEA_SCORE_MASK_NONE && a.kind <= TEA_SCORE_MASK_CAUSAL_BOTTOM_RIGHT, "kind",
              a.kind, "a tea_score_mask");
  const bool masked = forward && a.kind == TEA_SCORE_MASK_GIVEN;
  TEA_REQUIRE(masked || !a.mask, "mask", a.mask, "NULL except in forward with kind GIVEN");
  TEA_REQUIRE(!a.mask_batch || (masked && (a.mask_batch == 1 || a.mask_batch == a.batch)),
              "mask_batch", a.mask_batch, "1 or batch with a mask, 0 without");
  TEA_REQUIRE(!forward || !a.dout, "dout", a.dout, "NULL in forward");
  if (!require_sizes({{"batch", a.batch}, {"heads", a.heads}, {"rows", a.rows}, {"cols", a.cols}}))
    return false;
  const int bytes = dtype_bytes(a.dtype);
  require_pointers({{"input", a.input, bytes}, {"output", a.output, bytes}});
  if (masked) require_pointers({{"mask", a.mask}});
  if (!forward) require_pointers({{"dout", a.dout, bytes}});
  return true;
}

// Softmax of the first n scores in place; the others become zero.
void softmax_row(std::vector<double>& x, int64_t n, bool masked) {
  const auto end = x.begin() + n;
  // The maximum must propagate NaN, otherwise the rule for masked rows could drop it.
  double largest = -std::numeric_limits<double>::infinity();
  for (auto i = x.begin(); i != end; ++i)
    if (!(*i <= largest)) largest = std::isnan(largest) ? largest : *i;
  const bool empty = n == 0 || (masked && largest == kMaskedScore);
  std::fill(empty ? x.begin() : end, x.end(), 0.0);
  if (empty) return;
  double sum = 0;
  for (auto i = x.begin(); i != end; ++i) sum += * i = std::exp(*i - largest);
  for (auto i = x.begin(); i != end; ++i) *i /= sum;
}

}  // namespace

void scaled_softmax_forward(const tea_scaled_softmax& args, const Place& place) {
  const bool work = check(args, true), host = is_host(place);
  if (!work) return;
  const double scale = rounded_to(args.dtype, double{args.scale});
  if (!host) return on_gpu([&] { softmax_forward_on_gpu(args, scale, place); });
  std::vector<double> x(static_cast<size_t>(args.cols));
  for (int64_t matrix = 0; matrix < args.batch * args.heads; ++matrix)
    for (int64_t row = 0; row < args.rows; ++row) {
      const int64_t first = (matrix * args.rows + row) * args.cols, n = visible_count(args, row);
      const uint8_t* mask = mask_row(args, matrix, row);
      load_row(args.input, args.dtype, first, n, x.data());
      for (int64_t c = 0; c < n; ++c) {
        double& score = x[static_cast<size_t>(c)];
        score = mask && mask[c] == 1 ? kMaskedScore : score * scale;
      }
      softmax_row(x, n, mask);
      store_row(args.output, args.dtype, first, args.cols, x.data());
    }
}

void scaled_softmax_backward(const tea_scaled_softmax& args, const Place& place) {
  const bool work = check(args, false), host = is_host(place);
  if (!work) return;
  if (!host) return on_gpu([&] { softmax_backward_on_gpu(args, place); });
  const auto cols = static_cast<size_t>(args.cols);
  std::vector<double> y(cols), dy(cols);
  for (int64_t matrix = 0; matrix < args.batch * args.heads; ++matrix)
    for (int64_t row = 0; row < args.rows; ++row) {
      const int64_t first = (matrix * args.rows + row) * args.cols;
      const auto n = static_cast<size_t>(visible_count(args, row));
      load_row(args.input, args.dtype, first, static_cast<int64_t>(n), y.data());
      load_row(args.dout, args.dtype, first, static_cast<int64_t>(n), dy.data());
      double sum = 0;
      for (size_t c = 0; c < n; ++c) sum += y[c] * dy[c];
      for (size_t c = 0; c < n; ++c) dy[c] = double{args.scale} * y[c] * (dy[c] - sum);
      std::fill(dy.begin() + static_cast<int64_t>(n), dy.end(), 0.0);
      store_row(args.output, args.dtype, first, args.cols, dy.data());
    }
}

}  // namespace tea
