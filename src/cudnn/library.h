// cuDNN, loaded at run time where it is installed: nothing of it is linked, and without it every
// other engine runs.
#pragma once
#include <cstddef>
#include <string>

namespace tea::cudnn {

struct Library {
  void* symbols = nullptr;  // of dlopen(); NULL: not found
  std::string why_none;
  size_t version = 0;  // 91900 is 9.19.0
};

// The library that the process has already loaded (PyTorch does), else the one that the loader
// finds.
Library load(const std::string& name);

// libcudnn.so.9. Where it was not found it is looked for again: a framework may load it later.
Library library();

}  // namespace tea::cudnn
