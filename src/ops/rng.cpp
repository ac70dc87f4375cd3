// Random state: two 64-bit words, unsigned arithmetic.
#include "ops/rng.h"

namespace tea {

void fill_rng(int64_t* rng_state, uint64_t seed, uint64_t offset, const Place& place) {
  require_pointers({{"rng_state", rng_state}});
  require_host(place);
  rng_state[0] = static_cast<int64_t>(seed);
  rng_state[1] = static_cast<int64_t>(offset);
}

void fill_rng_captured(int64_t* rng_state, const CapturedRng& source, const Place& place) {
  require_pointers({{"rng_state", rng_state}, {"seed", source.seed}});
  require_host(place);
  const uint64_t offset = source.offset ? static_cast<uint64_t>(*source.offset) : 0;
  fill_rng(rng_state, static_cast<uint64_t>(*source.seed), offset + source.offset_in_graph, place);
}

void advance_rng(int64_t* rng_state, uint64_t increment, const Place& place) {
  require_pointers({{"rng_state", rng_state}});
  require_host(place);
  rng_state[1] = static_cast<int64_t>(static_cast<uint64_t>(rng_state[1]) + increment);
}

}  // namespace tea
