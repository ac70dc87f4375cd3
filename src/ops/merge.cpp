// Merging by LSE. All parts of a row and head are read before its result is written, so that the
// result may overwrite a part.
#include "ops/merge.h"

#include <algorithm>
#include <vector>

#include "core/problem.h"
#include "math/load_store.h"
#include "ops/on_gpu.h"
#include "ops/rows.h"

namespace tea {
namespace {

// Returns whether there is work.
bool check(const tea_merge& a) {
  require_dtype("part_dtype", a.part_dtype, kRealDtypes);
  if (a.o_dtype) require_dtype("o_dtype", a.o_dtype, kRealDtypes);
  TEA_REQUIRE(a.parts >= 1, "parts", a.parts, "1 or more");
  require_sizes({{"batch", a.batch}, {"rows", a.rows}, {"heads", a.heads}, {"dim", a.dim}});
  if (!require_sizes({{"batch", a.batch}, {"rows", a.rows}, {"heads", a.heads}})) return false;
  require_pointers({{"part_o", a.part_o}, {"part_lse", a.part_lse}});
  const int part_bytes = dtype_bytes(a.part_dtype);
  if (a.dim) require_pointers({{"o", a.o, a.o_dtype ? dtype_bytes(a.o_dtype) : part_bytes}});
  const int lse_bytes = dtype_bytes(lse_dtype(a));
  if (a.lse) require_pointers({{"lse", a.lse, lse_bytes}});
  for (int32_t i = 0; i < a.parts; ++i) {
    const std::string index = "[" + shown(i) + "]", part_o = "part_o" + index;
    if (a.dim) require_pointers({{part_o.c_str(), a.part_o[i], part_bytes}});
    require_pointers({{("part_lse" + index).c_str(), a.part_lse[i], lse_bytes}});
  }
  return true;
}

tea_strides lse_strides(const char* name, const tea_strides& given, const tea_merge& a) {
  const bool none = !given.batch && !given.seq && !given.head;
  const tea_strides contiguous = {a.heads * a.rows, 1, a.rows};
  return strides_or_contiguous(name, none ? contiguous : given, 1, 1, 1);
}

MergeStrides strides(const tea_merge& a) {
  return {strides_or_contiguous("part_o_stride", a.part_o_stride, a.rows, a.heads, a.dim),
          strides_or_contiguous("o_stride", a.o_stride, a.rows, a.heads, a.dim),
          lse_strides("part_lse_stride", a.part_lse_stride, a),
          lse_strides("lse_stride", a.lse_stride, a)};
}

struct Scratch {
  std::vector<double> part, sum;
};

void merge_row(const tea_merge& a, const MergeStrides& at, const MergeRow& p, Scratch& scratch) {
  const auto lse_of = [&](int32_t i) {
    return load_real(a.part_lse[i], lse_dtype(a), p.in(at.part_lse));
  };
  const double lse = merged_lse<double>(a.parts, lse_of);
  std::fill(scratch.sum.begin(), scratch.sum.end(), 0.0);
  for (int32_t i = 0; i < a.parts; ++i) {
    const double weight = merge_weight(lse_of(i), lse);
    if (weight == 0) continue;
    load_row(a.part_o[i], a.part_dtype, p.in(at.part_o), a.dim, scratch.part.data());
    for (size_t c = 0; c < scratch.sum.size(); ++c) scratch.sum[c] += weight * scratch.part[c];
  }
  if (a.dim)
    store_row(a.o, a.o_dtype ? a.o_dtype : a.part_dtype, p.in(at.o), a.dim, scratch.sum.data());
  if (a.lse) store_real(a.lse, lse_dtype(a), p.in(at.lse), lse);
}

}  // namespace

void merge_parts(const tea_merge& args, const Place& place) {
  const bool work = check(args), host = is_host(place);
  const MergeStrides at = strides(args);
  if (!work) return;
  if (!host) return on_gpu([&] { merge_on_gpu(args, at, place); });
  const auto dim = static_cast<size_t>(args.dim);
  Scratch scratch = {std::vector<double>(dim), std::vector<double>(dim)};
  for (int64_t b = 0; b < args.batch; ++b)
    for (int64_t row = 0; row < args.rows; ++row)
      for (int64_t h = 0; h < args.heads; ++h) merge_row(args, at, {b, row, h}, scratch);
}

}  // namespace tea
