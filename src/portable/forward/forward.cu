// Selects the forward kernel of a problem and launches it.
#include "portable/forward/forward.h"
#include "portable/forward/launch.h"
#include "portable/zero_fill.h"

namespace tea::portable {
namespace {

Launcher select_launcher(const Selection& s) {
  switch (s.variant) {
    case Variant::kPlainBf16:
      return find_launcher<Variant::kPlainBf16>(s.tile);
    case Variant::kPlainFp16:
      return find_launcher<Variant::kPlainFp16>(s.tile);
    case Variant::kGeneralBf16:
      return find_launcher<Variant::kGeneralBf16>(s.tile);
    case Variant::kGeneralFp16:
      return find_launcher<Variant::kGeneralFp16>(s.tile);
    case Variant::kFp8:
      return find_launcher<Variant::kFp8>(s.tile);
    case Variant::kFp32:
      break;
  }
  return find_launcher<Variant::kFp32>(s.tile);
}

}  // namespace

uint64_t forward_workspace(const Problem& problem, const Geometry& size) {
  Run run{};
  run.size = size;
  const AttentionArguments args = make_arguments(problem, run);
  const int64_t rows = split_rows(select_kernel(args).scheduler, args.batch);
  return static_cast<uint64_t>(rows * (args.dim_v + 2)) * sizeof(float);
}

void forward(const Problem& problem, const Run& run) {
  const auto stream = static_cast<cudaStream_t>(run.stream);
  KernelParams p{};
  p.args = make_arguments(problem, run);
  p.heads_per_kv = problem.heads_q / problem.heads_kv;
  fill_gaps(p.args, p.args.queries, {{p.args.o, p.args.heads_q, p.args.dim_v}}, true, stream);
  const Selection selected = select_kernel(p.args);
  p.scheduler = selected.scheduler;
  const int64_t ctas = p.scheduler.ctas(p.args.batch);
  if (ctas == 0) return;
  auto* const memory = static_cast<float*>(p.args.workspace);
  const int64_t rows = split_rows(p.scheduler, p.args.batch);
  p.splits = {memory, memory + rows * p.args.dim_v, memory + rows * (p.args.dim_v + 1)};
  select_launcher(selected)(p, ctas, stream);
  if (p.scheduler.splits > 1) combine_splits(p, stream);
}

}  // namespace tea::portable
