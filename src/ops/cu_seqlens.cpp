// Cumulative sequence lengths: sums in 64 bits, saturated to int32.
#include "ops/cu_seqlens.h"

#include <algorithm>
#include <limits>

#include "ops/on_gpu.h"

namespace tea {
namespace {

void check(const tea_cu_seqlens& a) {
  require_flag("mask_marks_tokens", a.mask_marks_tokens);
  require_sizes({{"batch", a.batch}, {"seqlen", a.seqlen}});
  require_pointers({{"cu_seqlens", a.cu_seqlens}});
  TEA_REQUIRE(!a.lengths || !a.mask, "mask", a.mask, "NULL where lengths are given");
  TEA_REQUIRE(a.lengths || a.mask || !a.batch, "lengths", a.lengths, "memory, or mask instead");
  TEA_REQUIRE(a.mask || !a.seqlen, "seqlen", a.seqlen, "0 without mask");
  TEA_REQUIRE(a.mask || !a.mask_marks_tokens, "mask_marks_tokens", a.mask_marks_tokens,
              "0 without mask");
}

int64_t length(const tea_cu_seqlens& a, int64_t i) {
  if (a.lengths) return a.lengths[i];
  int64_t marked = 0;
  for (int64_t t = 0; t < a.seqlen; ++t) marked += a.mask[i * a.seqlen + t] != 0;
  return a.mask_marks_tokens ? marked : a.seqlen - marked;
}

}  // namespace

void fill_cu_seqlens(const tea_cu_seqlens& args, const Place& place) {
  check(args);
  if (!is_host(place)) return on_gpu([&] { fill_cu_seqlens_on_gpu(args, place); });
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  int64_t sum = 0;
  args.cu_seqlens[0] = 0;
  for (int64_t i = 0; i < args.batch; ++i) {
    const int64_t n = length(args, i);
    if (n < 0 || n > kMost - sum) report(args.status, TEA_STATUS_BAD_LENGTHS);
    sum = std::min(kMost, sum + std::max<int64_t>(n, 0));
    args.cu_seqlens[i + 1] = static_cast<int32_t>(sum);
  }
}

int64_t count_positive(const int32_t* values, int64_t count, int32_t* scratch, const Place& place) {
  if (require_sizes({{"count", count}})) require_pointers({{"values", values}});
  if (!is_host(place)) {
    require_pointers({{"scratch", scratch}});
    if constexpr (kGpuCode) return count_positive_on_gpu(values, count, scratch, place);
  }
  return std::count_if(values, values + count, [](int32_t value) { return value > 0; });
}

}  // namespace tea
