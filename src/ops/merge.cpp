// Merging by LSE: all parts of one row and head are read before its result is written, so that the
// result may take the place of a part.
#include "ops/merge.h"

#include <cmath>
#include <limits>
#include <vector>

#include "ops/rows.h"

namespace tea {
namespace {

constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();

// Returns whether there is anything to do.
bool check(const tea_merge& a) {
  require_dtype("part_dtype", a.part_dtype, kRealDtypes);
  if (a.o_dtype) require_dtype("o_dtype", a.o_dtype, kRealDtypes);
  TEA_REQUIRE(a.parts >= 1, "parts", a.parts, "1 or more");
  require_sizes({{"batch", a.batch}, {"rows", a.rows}, {"heads", a.heads}, {"dim", a.dim}});
  if (!require_sizes({{"batch", a.batch}, {"rows", a.rows}, {"heads", a.heads}})) return false;
  require_pointers({{"part_o", a.part_o}, {"part_lse", a.part_lse}});
  if (a.dim) require_pointers({{"o", a.o}});
  for (int32_t i = 0; i < a.parts; ++i) {
    const std::string index = "[" + shown(i) + "]";
    if (a.dim) TEA_REQUIRE(a.part_o[i], "part_o" + index, a.part_o[i], "memory");
    TEA_REQUIRE(a.part_lse[i], "part_lse" + index, a.part_lse[i], "memory");
  }
  return true;
}

struct Layout {
  tea_strides part_o, o, part_lse, lse;
};

tea_strides lse_strides(const char* name, const tea_strides& given, const tea_merge& a) {
  const bool none = !given.batch && !given.seq && !given.head;
  const tea_strides contiguous = {a.heads * a.rows, 1, a.rows};
  return strides_or_contiguous(name, none ? contiguous : given, 1, 1, 1);
}

Layout layout(const tea_merge& a) {
  return {strides_or_contiguous("part_o_stride", a.part_o_stride, a.rows, a.heads, a.dim),
          strides_or_contiguous("o_stride", a.o_stride, a.rows, a.heads, a.dim),
          lse_strides("part_lse_stride", a.part_lse_stride, a),
          lse_strides("lse_stride", a.lse_stride, a)};
}

struct Position {
  int64_t batch, row, head;
  int64_t in(const tea_strides& s) const { return batch * s.batch + row * s.seq + head * s.head; }
};

struct Scratch {
  std::vector<double> part, sum;
};

void merge_row(const tea_merge& a, const Layout& at, const Position& p, Scratch& scratch) {
  double lse = kMinusInfinity;
  for (int32_t i = 0; i < a.parts; ++i)
    lse = log_add_exp(lse, double{a.part_lse[i][p.in(at.part_lse)]});
  std::fill(scratch.sum.begin(), scratch.sum.end(), 0.0);
  for (int32_t i = 0; i < a.parts; ++i) {
    const double part_lse = double{a.part_lse[i][p.in(at.part_lse)]};
    if (part_lse == kMinusInfinity) continue;
    const double weight = std::exp(part_lse - lse);
    load_row(a.part_o[i], a.part_dtype, p.in(at.part_o), a.dim, scratch.part.data());
    for (size_t c = 0; c < scratch.sum.size(); ++c) scratch.sum[c] += weight * scratch.part[c];
  }
  if (a.dim)
    store_row(a.o, a.o_dtype ? a.o_dtype : a.part_dtype, p.in(at.o), a.dim, scratch.sum.data());
  if (a.lse) a.lse[p.in(at.lse)] = static_cast<float>(lse);
}

}  // namespace

double log_add_exp(double a, double b) {
  const double high = a > b ? a : b, low = a > b ? b : a;
  if (low == kMinusInfinity) return high;
  return high + std::log1p(std::exp(low - high));
}

void merge_parts(const tea_merge& args, const Place& place) {
  const bool work = check(args);
  const Layout at = layout(args);
  require_host(place);
  if (!work) return;
  const auto dim = static_cast<size_t>(args.dim);
  Scratch scratch = {std::vector<double>(dim), std::vector<double>(dim)};
  for (int64_t b = 0; b < args.batch; ++b)
    for (int64_t row = 0; row < args.rows; ++row)
      for (int64_t h = 0; h < args.heads; ++h) merge_row(args, at, {b, row, h}, scratch);
}

}  // namespace tea
