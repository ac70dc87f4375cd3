// The state of the random numbers, and the number of segments: helpers whose NVTETensor parameters
// are raw pointers.
#include <algorithm>

#include "core/device.h"
#include "core/error.h"
#include "nvte/boundary.h"
#include "nvte/memory.h"
#include "transformer_engine/fused_attn.h"

namespace tea::nvte {
namespace {

// What one forward draws, in TransformerEngine's count: 16 numbers a thread, or all of P's over 128
// threads.
int64_t offset_step(NVTE_Fused_Attn_Backend backend, size_t rows_q, size_t rows_kv) {
  return backend == NVTE_F16_arbitrary_seqlen
             ? 16
             : static_cast<int64_t>((rows_q * rows_kv + 127) / 128);
}

template <class T>
T* needed(const char* name, T* pointer) {
  TEA_REQUIRE(pointer, name, pointer, "memory");
  TEA_REQUIRE(device_of(pointer) == kHost, name, "on a device",
              "host memory: this build has no engine for GPUs");
  return pointer;
}

}  // namespace
}  // namespace tea::nvte

using tea::nvte::needed;
using tea::nvte::offset_step;

void nvte_extract_seed_and_offset(int64_t* rng_state_ptr, int captured, int64_t* seed_ptr,
                                  uint64_t seed_val, int64_t* offset_ptr, uint64_t offset_val,
                                  uint32_t offset_intragraph, cudaStream_t) {
  TEA_NVTE_EXPORTED({
    int64_t* const state = needed("rng_state_ptr", rng_state_ptr);
    // Only one of each pointer and value is set: they share storage in the caller.
    uint64_t seed = seed_val, offset = offset_val;
    if (captured) {
      seed = static_cast<uint64_t>(*needed("seed_ptr", seed_ptr));
      offset = static_cast<uint64_t>(*needed("offset_ptr", offset_ptr)) + offset_intragraph;
    }
    state[0] = static_cast<int64_t>(seed);
    state[1] = static_cast<int64_t>(offset);
  });
}

void nvte_populate_rng_state_async(NVTETensor rng_state_dst, const NVTETensor seed,
                                   size_t q_max_seqlen, size_t kv_max_seqlen,
                                   NVTE_Fused_Attn_Backend backend, cudaStream_t) {
  static thread_local int64_t next_offset = 0;
  TEA_NVTE_EXPORTED({
    auto* const state = needed("rng_state_dst", static_cast<int64_t*>(rng_state_dst));
    state[0] = *needed("seed", static_cast<const int64_t*>(seed));
    state[1] = next_offset;
    next_offset += offset_step(backend, q_max_seqlen, kv_max_seqlen);
  });
}

uint32_t nvte_get_runtime_num_segments(NVTETensor cu_seqlens, NVTETensor workspace, size_t len,
                                       cudaStream_t) {
  return TEA_NVTE_EXPORTED({
    needed("workspace", static_cast<int32_t*>(workspace));
    if (len == 0) return uint32_t{0};
    const auto* const first = needed("cu_seqlens", static_cast<const int32_t*>(cu_seqlens));
    return static_cast<uint32_t>(
        std::count_if(first, first + len, [](int32_t entry) { return entry > 0; }));
  });
}
