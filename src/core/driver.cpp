// The driver's functions in use, by their names and numbers in CUDA's binary interface.
#include "core/driver.h"

#include <dlfcn.h>

#include <atomic>
#include <cstdint>
#include <mutex>

#include "core/error.h"

namespace tea::driver {
namespace {

using Context = void*;
using Address = unsigned long long;

// Numbers of CUdevice_attribute and CUpointer_attribute.
constexpr int kMultiprocessors = 16, kMajor = 75, kMinor = 76, kSharedOptIn = 97;
constexpr int kMemoryType = 2, kIsManaged = 8, kOrdinal = 9, kBegin = 11, kBytes = 12;
constexpr unsigned kDeviceMemory = 2;
constexpr int kRelaxed = 2;  // a CUstreamCaptureMode

// `name` is the entry, with the version of its binary interface.
#define TEA_DRIVER_ENTRIES(ENTRY)                                                      \
  ENTRY(init, "cuInit", unsigned)                                                      \
  ENTRY(error_name, "cuGetErrorName", int, const char**)                               \
  ENTRY(device_count, "cuDeviceGetCount", int*)                                        \
  ENTRY(device, "cuDeviceGet", int*, int)                                              \
  ENTRY(attribute, "cuDeviceGetAttribute", int*, int, int)                             \
  ENTRY(current_device, "cuCtxGetDevice", int*)                                        \
  ENTRY(primary_state, "cuDevicePrimaryCtxGetState", int, unsigned*, int*)             \
  ENTRY(retain_primary, "cuDevicePrimaryCtxRetain", Context*, int)                     \
  ENTRY(push, "cuCtxPushCurrent_v2", Context)                                          \
  ENTRY(pop, "cuCtxPopCurrent_v2", Context*)                                           \
  ENTRY(pointer_attributes, "cuPointerGetAttributes", unsigned, int*, void**, Address) \
  ENTRY(is_capturing, "cuStreamIsCapturing", void*, int*)                              \
  ENTRY(exchange_capture_mode, "cuThreadExchangeStreamCaptureMode", int*)              \
  ENTRY(memset8, "cuMemsetD8Async", Address, unsigned char, size_t, void*)             \
  ENTRY(memcpy, "cuMemcpyAsync", Address, Address, size_t, void*)

struct Entries {
#define TEA_DECLARE(member, name, ...) int (*member)(__VA_ARGS__) = nullptr;
  TEA_DRIVER_ENTRIES(TEA_DECLARE)
#undef TEA_DECLARE
  std::string missing;  // the function that was not found, or empty
};

Entries find_entries() {
  Entries out;
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    const char* why = dlerror();
    out.missing = "the driver was not found (" + std::string(why ? why : "libcuda.so.1") + ")";
    return out;
  }
#define TEA_FIND(member, name, ...)                                          \
  out.member = reinterpret_cast<decltype(out.member)>(dlsym(library, name)); \
  if (!out.member) out.missing = "the driver is too old: it has no " name;
  TEA_DRIVER_ENTRIES(TEA_FIND)
#undef TEA_FIND
  return out;
}

const Entries& entries() {
  static const Entries found = find_entries();
  return found;
}

std::string name_of(int code) {
  const char* name = nullptr;
  entries().error_name(code, &name);
  return name ? name : "error " + shown(code);
}

void require(int code, const char* what) {
  if (code) throw Error(TEA_FAILED, std::string(what) + ": " + name_of(code));
}

Device describe(int index) {
  const Entries& cuda = entries();
  int device = 0;
  require(cuda.device(&device, index), "cuDeviceGet");
  const auto attribute = [&](int which) {
    int value = 0;
    require(cuda.attribute(&value, which, device), "cuDeviceGetAttribute");
    return value;
  };
  return {index, 10 * attribute(kMajor) + attribute(kMinor), attribute(kMultiprocessors),
          attribute(kSharedOptIn)};
}

Gpus find_gpus() {
  const Entries& cuda = entries();
  if (!cuda.missing.empty()) return {{}, cuda.missing};
  if (const int code = cuda.init(0)) return {{}, "the driver says " + name_of(code)};
  int count = 0;
  require(cuda.device_count(&count), "cuDeviceGetCount");
  Gpus out{{}, count ? "" : "the driver sees none"};
  for (int i = 0; i < count; ++i) out.list.push_back(describe(i));
  return out;
}

// Primary contexts are retained for the life of the process, as in CUDA's runtime.
Context primary(int device) {
  static std::mutex mutex;
  static std::vector<Context> kept(gpus().list.size());
  const std::lock_guard lock(mutex);
  Context& context = kept.at(static_cast<size_t>(device));
  if (!context) require(entries().retain_primary(&context, device), "cuDevicePrimaryCtxRetain");
  return context;
}

// Whether this process has loaded the driver.
bool loaded() {
  static std::atomic<bool> seen = false;
  if (seen) return true;
  void* library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  if (!library) return false;
  dlclose(library);
  return seen = entries().missing.empty();
}

}  // namespace

const Gpus& gpus() {
  static const Gpus found = find_gpus();
  return found;
}

int current_device() {
  if (gpus().list.empty()) return kHost;
  int device = 0;
  return entries().current_device(&device) ? 0 : device;
}

int device_in_use() {
  if (!loaded()) return kHost;
  const Entries& cuda = entries();
  int device = 0, count = 0;
  if (cuda.current_device(&device) == 0) return device;
  if (cuda.device_count(&count)) return kHost;  // cuInit was never called
  for (int i = 0; i < count; ++i) {
    unsigned flags = 0;
    int active = 0;
    if (!cuda.device(&device, i) && !cuda.primary_state(device, &flags, &active) && active)
      return 0;
  }
  return kHost;
}

Allocation allocation_of(const void* pointer) {
  if (!pointer || !loaded()) return {};
  unsigned type = 0, managed = 0;
  int ordinal = kHost;
  Address begin = 0;
  size_t bytes = 0;
  int which[] = {kMemoryType, kIsManaged, kOrdinal, kBegin, kBytes};
  void* values[] = {&type, &managed, &ordinal, &begin, &bytes};
  const auto address = static_cast<Address>(reinterpret_cast<uintptr_t>(pointer));
  // Fails where cuInit was never called: then there is no device memory.
  if (entries().pointer_attributes(5, which, values, address)) return {};
  if (type != kDeviceMemory && !managed) return {};
  return {ordinal, static_cast<uintptr_t>(begin), bytes};
}

int device_of(const void* pointer) { return allocation_of(pointer).device; }

void fill(void* pointer, unsigned char value, size_t bytes, void* stream) {
  require(entries().memset8(reinterpret_cast<uintptr_t>(pointer), value, bytes, stream),
          "cuMemsetD8Async");
}

void copy(void* to, const void* from, size_t bytes, void* stream) {
  require(entries().memcpy(reinterpret_cast<uintptr_t>(to), reinterpret_cast<uintptr_t>(from),
                           bytes, stream),
          "cuMemcpyAsync");
}

bool is_capturing(void* stream) {
  int state = 0;
  require(entries().is_capturing(stream, &state), "cuStreamIsCapturing");
  return state != 0;
}

OutsideCapture::OutsideCapture() : mode_(kRelaxed) {
  require(entries().exchange_capture_mode(&mode_), "cuThreadExchangeStreamCaptureMode");
}

OutsideCapture::~OutsideCapture() { entries().exchange_capture_mode(&mode_); }

OnDevice::OnDevice(int device) {
  int current = kHost;
  if (!entries().missing.empty()) throw Error(TEA_UNSUPPORTED, entries().missing);
  if (entries().current_device(&current) == 0 && current == device) return;
  require(entries().push(primary(device)), "cuCtxPushCurrent");
  pushed_ = true;
}

OnDevice::~OnDevice() {
  Context popped;
  if (pushed_) entries().pop(&popped);
}

}  // namespace tea::driver
