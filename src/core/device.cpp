// Devices of this build: the host.
#include "core/device.h"

#include "core/error.h"

namespace tea {

Device device_at(int index) {
  TEA_REQUIRE(index >= kHost, "device", index, "-1 for the host, or the index of a GPU");
  if (index != kHost)
    throw Error(TEA_UNSUPPORTED, "device is " + shown(index) +
                                     "; needs -1, the host: this build has no engine for GPUs");
  return {};
}

}  // namespace tea
