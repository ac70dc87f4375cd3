// Random state: two 64-bit words, unsigned arithmetic.
#include "ops/rng.h"

namespace tea {
namespace {

void run(const RngUpdate& update, const Place& place) {
  if (is_host(place))
    update();
  else if constexpr (kGpuCode)
    update_rng_on_gpu(update, place);
}

}  // namespace

void fill_rng(int64_t* rng_state, uint64_t seed, uint64_t offset, const Place& place) {
  require_pointers({{"rng_state", rng_state}});
  run({rng_state, nullptr, nullptr, seed, offset}, place);
}

void fill_rng_captured(int64_t* rng_state, const CapturedRng& source, const Place& place) {
  require_pointers({{"rng_state", rng_state}, {"seed", source.seed}});
  run({rng_state, source.seed, source.offset, 0, source.offset_in_graph}, place);
}

void advance_rng(int64_t* rng_state, uint64_t increment, const Place& place) {
  require_pointers({{"rng_state", rng_state}});
  run({rng_state, rng_state, rng_state + 1, 0, increment}, place);
}

}  // namespace tea
