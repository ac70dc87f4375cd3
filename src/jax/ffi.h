// XLA's FFI, at the oldest minor version that is supported: the runtime refuses a handler whose
// minor version is above its own, and compares nothing else.
#pragma once
#include <exception>

#include "te_attention.h"
#include "xla/ffi/api/c_api.h"
#undef XLA_FFI_API_MINOR
#define XLA_FFI_API_MINOR 1
#include "xla/ffi/api/ffi.h"

// Defines a handler that jax.ffi.register_ffi_target() can find by its name. Those of CUDA have the
// trait kCmdBufferCompatible, because XLA may capture them into command buffers: they allocate
// nothing, wait for nothing and read no memory of the device on the host.
#define TEA_JAX_HANDLER(name, function, ...)                                                 \
  extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* name(XLA_FFI_CallFrame*); \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name, (function), __VA_ARGS__)

namespace tea::jax {

namespace ffi = xla::ffi;

// The binding of a handler of CUDA: device and stream, before what the caller adds.
inline auto bind_cuda() {
  return ffi::Ffi::Bind().Ctx<ffi::DeviceOrdinal>().Ctx<ffi::PlatformStream<void*>>();
}

// The text of tea_error(), with the code that JAX turns into an exception.
inline ffi::Error error_of(tea_status status) {
  const ffi::ErrorCode code = status == TEA_FAILED        ? ffi::ErrorCode::kInternal
                              : status == TEA_UNSUPPORTED ? ffi::ErrorCode::kUnimplemented
                                                          : ffi::ErrorCode::kInvalidArgument;
  return ffi::Error(code, tea_error());
}

// Runs a handler's body. No exception may cross XLA's C interface.
template <class Body>
ffi::Error guarded(const Body& body) noexcept {
  try {
    return body();
  } catch (const std::exception& e) {
    return ffi::Error::InvalidArgument(e.what());
  } catch (...) {
    return ffi::Error(ffi::ErrorCode::kInternal, "unknown exception");
  }
}

}  // namespace tea::jax
