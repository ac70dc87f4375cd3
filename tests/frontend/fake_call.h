// A call of attention whose tensors belong to no framework.
#pragma once
#include <array>
#include <deque>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "frontend/describe.h"

namespace tea::frontend {

// Tensors on the host that share one piece of memory; nothing reads it.
class FakeCall {
 public:
  Options options{};

  FakeCall(std::array<int64_t, 4> q, std::array<int64_t, 4> kv, const char* format) {
    options.q = contiguous({q.begin(), q.end()});
    options.k = options.v = contiguous({kv.begin(), kv.end()});
    options.format = format, options.mask = "none";
    options.window_left = options.window_right = -1;
    options.max_seqlen_q = options.max_seqlen_kv = -1;
  }

  Tensor contiguous(std::vector<int64_t> size, int32_t type = TEA_BF16) {
    std::vector<int64_t> stride(size.size());
    int64_t step = 1;
    for (size_t i = size.size(); i-- > 0; step *= size[i]) stride[i] = step;
    const std::vector<int64_t>& kept = kept_.emplace_back(std::move(size));
    const std::vector<int64_t>& strides = kept_.emplace_back(std::move(stride));
    return {memory_, type, -1, static_cast<int>(kept.size()), kept.data(), strides.data()};
  }

  // The problem's line, or the error.
  std::string line() {
    try {
      Description description(options);
      description.finish();
      char text[1024];
      if (tea_problem_print(&description.problem, text, sizeof text, nullptr)) return tea_error();
      return text;
    } catch (const std::runtime_error& e) {
      return e.what();
    }
  }

 private:
  alignas(16) char memory_[16]{};
  std::deque<std::vector<int64_t>> kept_;
};

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace tea::frontend
