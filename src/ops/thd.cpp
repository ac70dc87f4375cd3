// thd <-> bshd: one walk over the sequences serves both directions.
#include "ops/thd.h"

#include "core/problem.h"
#include "math/lengths.h"
#include "ops/rows.h"

namespace tea {
namespace {

struct Views {
  Rows thd, bshd;
};

Views checked(const tea_thd_convert& a, bool to_bshd, const Place& place) {
  require_dtype("dtype", a.dtype, kAnyDtype);
  require_flag("zero_fill", a.zero_fill);
  require_reserved("reserved", a.reserved);
  const bool no_bshd = !require_sizes(
      {{"batch", a.batch}, {"seqlen", a.seqlen}, {"heads", a.heads}, {"dim", a.dim}});
  const bool no_thd = !require_sizes({{"tokens", a.tokens}, {"heads", a.heads}, {"dim", a.dim}});
  if (a.batch) require_pointers({{"cu_seqlens", a.cu_seqlens}});
  if (!(to_bshd ? no_thd : no_bshd)) require_pointers({{"input", a.input}});
  if (!(to_bshd ? no_bshd : no_thd)) require_pointers({{"output", a.output}});
  const tea_strides bshd =
      strides_or_contiguous("bshd_stride", a.bshd_stride, a.seqlen, a.heads, a.dim);
  const tea_strides thd =
      strides_or_contiguous("thd_stride", a.thd_stride, a.tokens, a.heads, a.dim);
  require_host(place);
  const int bytes = dtype_bytes(a.dtype);
  return {rows_of(to_bshd ? a.input : a.output, thd, a.heads, a.dim, bytes),
          rows_of(to_bshd ? a.output : a.input, bshd, a.heads, a.dim, bytes)};
}

Sequence sequence(const tea_thd_convert& a, int64_t i) {
  const Sequence s = ragged_sequence(a.cu_seqlens, a.offsets, i, a.seqlen, a.tokens);
  if (!s.sane) report(a.status, TEA_STATUS_BAD_LENGTHS);
  return s;
}

}  // namespace

void thd_to_bshd(const tea_thd_convert& args, const Place& place) {
  const auto [thd, bshd] = checked(args, true, place);
  if (!args.heads || !args.dim) return;
  for (int64_t i = 0; i < args.batch; ++i) {
    const Sequence s = sequence(args, i);
    for (int64_t t = 0; t < s.length; ++t)
      copy_row(bshd, bshd.row(i, t), thd, thd.row(0, s.start + t));
    for (int64_t t = s.length; args.zero_fill && t < args.seqlen; ++t)
      zero_row(bshd, bshd.row(i, t));
  }
}

void bshd_to_thd(const tea_thd_convert& args, const Place& place) {
  const auto [thd, bshd] = checked(args, false, place);
  if (!args.heads || !args.dim) return;
  // Offsets need not be ascending, so which rows are gaps is only known at the end.
  for (int64_t t = 0; args.zero_fill && t < args.tokens; ++t) zero_row(thd, thd.row(0, t));
  for (int64_t i = 0; i < args.batch; ++i) {
    const Sequence s = sequence(args, i);
    for (int64_t t = 0; t < s.length; ++t)
      copy_row(thd, thd.row(0, s.start + t), bshd, bshd.row(i, t));
  }
}

}  // namespace tea
