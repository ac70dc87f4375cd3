// The devices of this machine: the host, and its GPUs if this build has device code.
#include "core/device.h"

#include "core/driver.h"
#include "core/error.h"

namespace tea {
namespace {

#if defined(TE_ATTENTION_CUDA)
constexpr bool kBuiltForGpus = true;
#else
constexpr bool kBuiltForGpus = false;
#endif

[[noreturn]] void refuse(int index, const std::string& why) {
  throw Error(TEA_UNSUPPORTED, "device is " + shown(index) + "; needs -1, the host" + why);
}

}  // namespace

Device device_at(int index) {
  TEA_REQUIRE(index >= kHost, "device", index, "-1 for the host, or the index of a GPU");
  if (index == kHost) return {};
  if (!kBuiltForGpus) refuse(index, ": this build has no engine for GPUs (TE_ATTENTION_CUDA=OFF)");
  const driver::Gpus& gpus = driver::gpus();
  const auto count = static_cast<int>(gpus.list.size());
  if (!count) refuse(index, ": no GPU: " + gpus.why_none);
  if (index >= count) refuse(index, ", or a GPU from 0 to " + shown(count - 1));
  return gpus.list[static_cast<size_t>(index)];
}

}  // namespace tea
