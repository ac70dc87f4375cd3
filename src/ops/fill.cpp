// Fills of bytes and of elements: an element is rounded once and then copied.
#include "ops/fill.h"

#include <cstring>

#include "core/problem.h"
#include "math/load_store.h"
#include "ops/on_gpu.h"

namespace tea {
namespace {

void fill(void* data, const Pattern& pattern, int64_t bytes, const Place& place) {
  if (!is_host(place)) return on_gpu([&] { fill_pattern_on_gpu(data, pattern, bytes, place); });
  for (int64_t at = 0; at < bytes; at += pattern.size)
    std::memcpy(static_cast<char*>(data) + at, pattern.byte, static_cast<size_t>(pattern.size));
}

}  // namespace

void fill_bytes(void* data, int value, uint64_t bytes, const Place& place) {
  const bool host = is_host(place);
  if (!bytes) return;
  require_pointers({{"data", data, 1}});
  require_sizes({{"bytes", static_cast<int64_t>(bytes)}});
  if (host)
    std::memset(data, value, bytes);
  else
    fill(data, {{static_cast<unsigned char>(value)}, 1}, static_cast<int64_t>(bytes), place);
}

void fill_elements(const Elements& to, double value, const Place& place) {
  require_dtype("dtype", to.dtype, kAnyDtype);
  if (require_sizes({{"count", to.count}}))
    require_pointers({{"data", to.data, dtype_bytes(to.dtype)}});
  Pattern element{{}, dtype_bytes(to.dtype)};
  store_real(element.byte, to.dtype, 0, value);
  fill(to.data, element, to.count * element.size, place);
}

}  // namespace tea
