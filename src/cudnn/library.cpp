// Finds cuDNN and asks for its version.
#include "cudnn/library.h"

#include <dlfcn.h>

#include <mutex>

namespace tea::cudnn {

Library load(const std::string& name) {
  Library out;
  out.symbols = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!out.symbols) {
    const char* const error = dlerror();
    out.why_none = error ? error : name;
    return out;
  }
  const auto version = reinterpret_cast<size_t (*)()>(dlsym(out.symbols, "cudnnGetVersion"));
  if (version) out.version = version();
  return out;
}

Library library() {
  static std::mutex mutex;
  static Library found;
  const std::lock_guard lock(mutex);
  if (!found.symbols) found = load("libcudnn.so.9");
  return found;
}

}  // namespace tea::cudnn
