// Interleaved QKV: a walk over the heads of the dense side, and for each its place in the other.
#include "ops/flash_prepare.h"

#include "core/problem.h"

namespace tea {
namespace {

// Returns the bytes of one head, 0 if there is nothing to do.
size_t check(const tea_flash_prepare& a, bool forward) {
  require_dtype("dtype", a.dtype, kAnyDtype);
  const int64_t elements = require_sizes({{"seqlen", a.seqlen},
                                          {"batch", a.batch},
                                          {"heads", a.heads},
                                          {"dim", a.dim},
                                          {"tensors", 3}});
  for (int i : {1, 2})
    TEA_REQUIRE(!forward || !a.input[i], "input[" + shown(i) + "]", a.input[i], "NULL in forward");
  if (!elements) return 0;
  require_pointers({{"input[0]", a.input[0]}, {"output", a.output}});
  if (!forward) require_pointers({{"input[1]", a.input[1]}, {"input[2]", a.input[2]}});
  return static_cast<size_t>(a.dim * dtype_bytes(a.dtype));
}

// Calls body(which, index of the head in [batch, seqlen, heads], index in [seqlen, batch, heads,
// 3]).
template <class Body>
void for_each_head(const tea_flash_prepare& a, Body body) {
  for (int64_t which = 0; which < 3; ++which)
    for (int64_t b = 0; b < a.batch; ++b)
      for (int64_t s = 0; s < a.seqlen; ++s)
        for (int64_t h = 0; h < a.heads; ++h)
          body(which, (b * a.seqlen + s) * a.heads + h,
               ((s * a.batch + b) * a.heads + h) * 3 + which);
}

}  // namespace

void flash_prepare_forward(const tea_flash_prepare& args, const Place& place) {
  const size_t bytes = check(args, true);
  require_host(place);
  if (!bytes) return;
  const auto* from = static_cast<const char*>(args.input[0]);
  auto* to = static_cast<char*>(args.output);
  const int64_t heads = args.batch * args.seqlen * args.heads;
  const auto pitch = static_cast<int64_t>(bytes);
  for_each_head(args, [&](int64_t which, int64_t dense, int64_t interleaved) {
    std::memcpy(to + (which * heads + dense) * pitch, from + interleaved * pitch, bytes);
  });
}

void flash_prepare_backward(const tea_flash_prepare& args, const Place& place) {
  const size_t bytes = check(args, false);
  require_host(place);
  if (!bytes) return;
  auto* to = static_cast<char*>(args.output);
  const auto pitch = static_cast<int64_t>(bytes);
  for_each_head(args, [&](int64_t which, int64_t dense, int64_t interleaved) {
    const auto* from = static_cast<const char*>(args.input[which]);
    std::memcpy(to + interleaved * pitch, from + dense * pitch, bytes);
  });
}

}  // namespace tea
