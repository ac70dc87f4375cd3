// Interleaved QKV: checks.
#include "ops/flash_prepare.h"

#include "core/problem.h"

namespace tea {
namespace {

FlashPrepareMoves checked(const tea_flash_prepare& a, bool forward) {
  require_dtype("dtype", a.dtype, kAnyDtype);
  const int64_t elements = require_sizes({{"seqlen", a.seqlen},
                                          {"batch", a.batch},
                                          {"heads", a.heads},
                                          {"dim", a.dim},
                                          {"tensors", 3}});
  for (int i : {1, 2})
    TEA_REQUIRE(!forward || !a.input[i], "input[" + shown(i) + "]", a.input[i], "NULL in forward");
  FlashPrepareMoves m{};
  if (!elements) return m;
  const int bytes = dtype_bytes(a.dtype);
  require_pointers({{"input[0]", a.input[0], bytes}, {"output", a.output, bytes}});
  if (!forward)
    require_pointers({{"input[1]", a.input[1], bytes}, {"input[2]", a.input[2], bytes}});
  m.a = a;
  m.forward = forward;
  m.bytes = a.dim * bytes;
  m.moves = elements / a.dim;
  m.align(m.bytes);
  for (const void* address :
       {a.input[0], a.input[1], a.input[2], static_cast<const void*>(a.output)})
    m.align(address);
  return m;
}

}  // namespace

void flash_prepare_forward(const tea_flash_prepare& args, const Place& place) {
  run(checked(args, true), place);
}

void flash_prepare_backward(const tea_flash_prepare& args, const Place& place) {
  run(checked(args, false), place);
}

}  // namespace tea
