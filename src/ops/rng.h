// The random state {seed, offset} of dropout: filled, filled from a captured graph's generator, or
// advanced.
#pragma once
#include "ops/args.h"

namespace tea {

void fill_rng(int64_t* rng_state, uint64_t seed, uint64_t offset, const Place& place);

// A generator whose state is in device memory, read when the work runs.
struct CapturedRng {
  const int64_t* seed;
  const int64_t* offset;  // NULL: 0
  uint64_t offset_in_graph;
};
void fill_rng_captured(int64_t* rng_state, const CapturedRng& source, const Place& place);

void advance_rng(int64_t* rng_state, uint64_t increment, const Place& place);

// The three operations: each word is a number plus the value at an address, if given.
struct RngUpdate {
  int64_t* state;
  const int64_t *seed_at, *offset_at;
  uint64_t seed, offset;

  TEA_HOST_DEVICE void operator()() const {
    state[0] = static_cast<int64_t>(seed + (seed_at ? static_cast<uint64_t>(*seed_at) : 0));
    state[1] = static_cast<int64_t>(offset + (offset_at ? static_cast<uint64_t>(*offset_at) : 0));
  }
};
void update_rng_on_gpu(const RngUpdate& update, const Place& place);

}  // namespace tea
