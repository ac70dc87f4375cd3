// Fills with 16-byte stores, for any alignment of the memory.
#include "ops/fill.h"
#include "ops/launch.cuh"

namespace tea {
namespace {

// The 16 bytes for every aligned address.
struct AlignedPattern {
  alignas(16) unsigned char byte[16];
};

// `first`: the aligned address at or before the start of the memory, `skip` bytes before it.
__global__ void __launch_bounds__(kBlock)
    fill_pattern(uint4* first, const AlignedPattern aligned, int64_t skip, int64_t end) {
  const uint4 value = *reinterpret_cast<const uint4*>(aligned.byte);
  const int64_t stores = (end + 15) / 16;
  for (int64_t i = thread_index(); i < stores; i += thread_count()) {
    const int64_t at = i * 16;
    if (at >= skip && at + 16 <= end) {
      first[i] = value;
    } else {
      for (int b = 0; b < 16; ++b)
        if (at + b >= skip && at + b < end)
          reinterpret_cast<unsigned char*>(first)[at + b] = aligned.byte[b];
    }
  }
}

}  // namespace

void fill_pattern_on_gpu(void* data, const Pattern& pattern, int64_t bytes, const Place& place) {
  if (!bytes) return;
  const auto skip = static_cast<int64_t>(reinterpret_cast<uintptr_t>(data) % 16);
  AlignedPattern aligned;
  for (int b = 0; b < 16; ++b) aligned.byte[b] = pattern.byte[(b + 16 - skip) % pattern.size];
  auto* const first = reinterpret_cast<uint4*>(static_cast<char*>(data) - skip);
  launch({"fill_pattern", blocks_for((skip + bytes + 15) / 16)}, fill_pattern, place, first,
         aligned, skip, skip + bytes);
}

}  // namespace tea
