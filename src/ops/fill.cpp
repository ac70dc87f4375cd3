// Fills of bytes and of elements.
#include "ops/fill.h"

#include "math/load_store.h"

namespace tea {

void fill_bytes(void* data, int value, uint64_t bytes, const Place& place) {
  require_host(place);
  if (!bytes) return;
  require_pointers({{"data", data}});
  std::memset(data, value, bytes);
}

void fill_elements(const Elements& to, double value, const Place& place) {
  require_dtype("dtype", to.dtype, kAnyDtype);
  if (require_sizes({{"count", to.count}})) require_pointers({{"data", to.data}});
  require_host(place);
  for (int64_t i = 0; i < to.count; ++i) store_real(to.data, to.dtype, i, value);
}

}  // namespace tea
