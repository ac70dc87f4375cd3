// The random state and the number of segments: functions whose NVTETensor parameters are raw
// pointers.
#include "ops/rng.h"

#include <initializer_list>

#include "nvte/boundary.h"
#include "nvte/memory.h"
#include "ops/cu_seqlens.h"
#include "transformer_engine/fused_attn.h"

namespace tea::nvte {
namespace {

// The increment of one forward in TransformerEngine: 16 numbers per thread, or the size of P
// divided by 128 threads.
uint64_t offset_step(NVTE_Fused_Attn_Backend backend, size_t rows_q, size_t rows_kv) {
  return backend == NVTE_F16_arbitrary_seqlen ? 16 : (rows_q * rows_kv + 127) / 128;
}

template <class T>
T* needed(const char* name, T* pointer) {
  TEA_REQUIRE(pointer, name, pointer, "memory");
  return pointer;
}

struct Named {
  const char* name;
  const void* memory;
};

// The device or host of the call's memory, which must be the same for all.
Place place_of(std::initializer_list<Named> parts, cudaStream_t stream) {
  MemorySide side;
  for (const Named& part : parts) side.add(part.name, part.memory);
  return {side.device(), stream};
}

}  // namespace
}  // namespace tea::nvte

using tea::nvte::needed;
using tea::nvte::offset_step;
using tea::nvte::place_of;

void nvte_extract_seed_and_offset(int64_t* rng_state_ptr, int captured, int64_t* seed_ptr,
                                  uint64_t seed_val, int64_t* offset_ptr, uint64_t offset_val,
                                  uint32_t offset_intragraph, cudaStream_t stream) {
  TEA_NVTE_EXPORTED({
    int64_t* const state = needed("rng_state_ptr", rng_state_ptr);
    // Only the pointers or only the values are set: they share storage in the caller.
    if (!captured)
      return fill_rng(state, seed_val, offset_val, place_of({{"rng_state_ptr", state}}, stream));
    const auto* const seed = needed("seed_ptr", seed_ptr);
    const auto* const offset = needed("offset_ptr", offset_ptr);
    fill_rng_captured(
        state, {seed, offset, offset_intragraph},
        place_of({{"rng_state_ptr", state}, {"seed_ptr", seed}, {"offset_ptr", offset}}, stream));
  });
}

void nvte_populate_rng_state_async(NVTETensor rng_state_dst, const NVTETensor seed,
                                   size_t q_max_seqlen, size_t kv_max_seqlen,
                                   NVTE_Fused_Attn_Backend backend, cudaStream_t stream) {
  static thread_local uint64_t next_offset = 0;
  TEA_NVTE_EXPORTED({
    auto* const state = needed("rng_state_dst", static_cast<int64_t*>(rng_state_dst));
    const auto* const source = needed("seed", static_cast<const int64_t*>(seed));
    fill_rng_captured(state, {source, nullptr, next_offset},
                      place_of({{"rng_state_dst", state}, {"seed", source}}, stream));
    next_offset += offset_step(backend, q_max_seqlen, kv_max_seqlen);
  });
}

uint32_t nvte_get_runtime_num_segments(NVTETensor cu_seqlens, NVTETensor workspace, size_t len,
                                       cudaStream_t stream) {
  return TEA_NVTE_EXPORTED({
    auto* const scratch = needed("workspace", static_cast<int32_t*>(workspace));
    if (len == 0) return uint32_t{0};
    const auto* const first = needed("cu_seqlens", static_cast<const int32_t*>(cu_seqlens));
    return static_cast<uint32_t>(
        tea::count_positive(first, static_cast<int64_t>(len), scratch,
                            place_of({{"cu_seqlens", first}, {"workspace", scratch}}, stream)));
  });
}
