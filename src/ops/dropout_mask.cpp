// The dropout mask as bytes, by math/dropout.h, one element at a time.
#include "ops/dropout_mask.h"

#include "core/tensors.h"
#include "math/dropout.h"
#include "ops/on_gpu.h"

namespace tea {
namespace {

void check(const tea_dropout_mask& a) {
  TEA_REQUIRE(a.dropout >= 0 && a.dropout < 1, "dropout", a.dropout, "at least 0 and below 1");
  require_origin("", a.origin, a.origin_device);
  if (require_sizes({{"batch", a.batch}, {"heads", a.heads}, {"rows", a.rows}, {"cols", a.cols}}))
    require_pointers({{"keep", a.keep}, {"rng_state", a.rng_state}});
}

}  // namespace

void dropout_keep(const tea_dropout_mask& args, const Place& place) {
  check(args);
  const bool host = is_host(place);
  if (!args.batch || !args.heads || !args.rows || !args.cols) return;
  if (!host) return on_gpu([&] { dropout_keep_on_gpu(args, place); });
  const int64_t origin[] = {origin_of(args, 0), origin_of(args, 1), origin_of(args, 2),
                            origin_of(args, 3)};
  const RngState rng = {static_cast<uint64_t>(args.rng_state[0]),
                        static_cast<uint64_t>(args.rng_state[1])};
  const uint32_t threshold = dropout_threshold(args.dropout);
  uint8_t* keep = args.keep;
  for (int64_t b = 0; b < args.batch; ++b)
    for (int64_t h = 0; h < args.heads; ++h) {
      const uint32_t stream = dropout_stream(b + origin[0], h + origin[1]);
      for (int64_t row = 0; row < args.rows; ++row)
        for (int64_t col = 0; col < args.cols; ++col)
          *keep++ = dropout_keeps(rng, stream, row + origin[2], col + origin[3], threshold);
    }
}

}  // namespace tea
