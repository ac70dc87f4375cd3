// The random state {seed, offset} that dropout reads: filled, filled from a captured graph's
// generator, advanced.
#pragma once
#include "ops/args.h"

namespace tea {

void fill_rng(int64_t* rng_state, uint64_t seed, uint64_t offset, const Place& place);

// A generator whose state lives beside the tensors, read when the work runs.
struct CapturedRng {
  const int64_t* seed;
  const int64_t* offset;  // NULL: 0
  uint64_t offset_in_graph;
};
void fill_rng_captured(int64_t* rng_state, const CapturedRng& source, const Place& place);

void advance_rng(int64_t* rng_state, uint64_t increment, const Place& place);

}  // namespace tea
