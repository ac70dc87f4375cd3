// Checks the arguments of a forward launch, selects the kernel and launches it.
#include <atomic>
#include <random>

#include "hopper/forward/forward.h"
#include "hopper/forward/launch.h"

namespace tea::hopper {
namespace {

// Whether the number of tiles exceeds 31 bits.
bool has_too_many_tiles(const AttentionArguments& a) {
  const int64_t tiles = (a.queries.max_seqlen / 64 + 1) * a.heads_q;
  return a.queries.max_seqlen > kMaxSeqlen || a.keys.max_seqlen > kMaxSeqlen ||
         (a.batch > 0 && tiles > INT32_MAX / a.batch);
}

Launcher find_launcher(const Selection& s, Type type) {
  switch (s.variant) {
    case Variant::kUnmasked:
      return find_launcher<Variant::kUnmasked>(s.tile, type);
    case Variant::kMasked:
      return find_launcher<Variant::kMasked>(s.tile, type);
    case Variant::kSoftcap:
      return find_launcher<Variant::kSoftcap>(s.tile, type);
    case Variant::kDropout:
      return find_launcher<Variant::kDropout>(s.tile, type);
    case Variant::kGeneral:
      return find_launcher<Variant::kGeneral>(s.tile, type);
    case Variant::kBias:
      return find_launcher<Variant::kBias>(s.tile, type);
    case Variant::kPaged:
      return find_launcher<Variant::kPaged>(s.tile, type);
    case Variant::kPagedGeneral:
      return find_launcher<Variant::kPagedGeneral>(s.tile, type);
  }
  return nullptr;
}

}  // namespace

uint64_t next_launch_number() {
  static std::atomic<uint64_t> next = [] {
    std::random_device random;
    return uint64_t{random()} << 32 | random();
  }();
  return next.fetch_add(1, std::memory_order_relaxed) | uint64_t{1} << 63;
}

Outcome forward(const AttentionArguments& a, void* stream) {
  const Selection selected = select_kernel(a);
  if (selected.tile < 0)
    return refusal(a.keys.form == TEA_PAGED ? "pages of this size, or a bias over pages"
                                            : "head dimensions beyond the table");
  if (has_too_many_tiles(a)) return refusal("more tiles than can be counted");
  if (needs_tile_counter(a, selected) && !a.workspace)
    return refusal("tiles of different lengths without a counter");
  const bool empty = a.queries.form == TEA_DENSE && (a.queries.max_seqlen == 0 || a.batch == 0);
  if (empty || a.heads_q == 0) return {};
  const Launcher launch =
      find_launcher(selected, a.q.dtype == TEA_FP16 ? Type::kFp16 : Type::kBf16);
  return launch(a, selected, static_cast<cudaStream_t>(stream));
}

}  // namespace tea::hopper
