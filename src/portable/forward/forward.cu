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
  const TileScheduler s = select_kernel(args).scheduler;
  const int64_t rows = split_rows(s, args.batch) + earlier_rows(s, args.keys, args.batch);
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
  auto* memory = static_cast<float*>(p.args.workspace);
  const auto take = [&](int64_t rows) {
    const SplitResults out = {memory, memory + rows * p.args.dim_v,
                              memory + rows * (p.args.dim_v + 1)};
    memory += rows * (p.args.dim_v + 2);
    return out;
  };
  p.splits = take(split_rows(p.scheduler, p.args.batch));
  p.earlier = take(earlier_rows(p.scheduler, p.args.keys, p.args.batch));
  const int all = all_splits(p.scheduler, p.args.keys), step = p.scheduler.splits;
  for (int& first = p.scheduler.first_split; first < all; first += step) {
    p.has_earlier = first > 0, p.is_last = first + step >= all;
    select_launcher(selected)(p, ctas, stream);
    if (p.scheduler.is_split()) combine_splits(p, stream);
  }
}

}  // namespace tea::portable
