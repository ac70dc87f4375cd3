// thd <-> bshd: checks, and gaps.
#include "ops/thd.h"

#include <cstring>

#include "core/problem.h"

namespace tea {
namespace {

ThdMoves checked(const tea_thd_convert& a, bool to_bshd) {
  require_dtype("dtype", a.dtype, kAnyDtype);
  require_flag("zero_fill", a.zero_fill);
  require_reserved("reserved", a.reserved);
  const bool no_bshd = !require_sizes(
      {{"batch", a.batch}, {"seqlen", a.seqlen}, {"heads", a.heads}, {"dim", a.dim}});
  const bool no_thd = !require_sizes({{"tokens", a.tokens}, {"heads", a.heads}, {"dim", a.dim}});
  if (a.batch) require_pointers({{"cu_seqlens", a.cu_seqlens}});
  const int bytes = dtype_bytes(a.dtype);
  if (!(to_bshd ? no_thd : no_bshd)) require_pointers({{"input", a.input, bytes}});
  if (!(to_bshd ? no_bshd : no_thd)) require_pointers({{"output", a.output, bytes}});
  const tea_strides bshd =
      strides_or_contiguous("bshd_stride", a.bshd_stride, a.seqlen, a.heads, a.dim);
  const tea_strides thd =
      strides_or_contiguous("thd_stride", a.thd_stride, a.tokens, a.heads, a.dim);
  ThdMoves m{};
  m.a = a;
  m.to_bshd = to_bshd;
  m.thd = rows_of(to_bshd ? a.input : a.output, thd, a.heads, a.dim, bytes);
  m.bshd = rows_of(to_bshd ? a.output : a.input, bshd, a.heads, a.dim, bytes);
  set_runs(m, m.thd, m.bshd);
  m.runs = m.moves;
  m.moves = a.batch * a.seqlen * m.runs;
  m.checks = m.bytes ? a.batch : 0;
  return m;
}

// Offsets need not ascend, so the gaps are known only after all sequences have been read.
void zero_all(const ThdMoves& m) {
  for (int64_t t = 0; t < m.a.tokens; ++t)
    for (int64_t run = 0; run < m.runs; ++run)
      std::memset(m.thd.at(0, t, run), 0, static_cast<size_t>(m.bytes));
}

}  // namespace

void thd_to_bshd(const tea_thd_convert& args, const Place& place) {
  run(checked(args, true), place);
}

void bshd_to_thd(const tea_thd_convert& args, const Place& place) {
  const ThdMoves moves = checked(args, false);
  const bool gaps = args.zero_fill && moves.bytes;
  if (gaps) {
    if (is_host(place))
      zero_all(moves);
    else if constexpr (kGpuCode)
      zero_gaps_on_gpu(moves, place);
  }
  run(moves, place, gaps);
}

}  // namespace tea
