// The arguments of an operator on PyTorch's stack, read in order, and its results. Every argument
// must be read, because an unread one leaks. For an operator with fewer arguments, reads past the
// last one return the default.
#pragma once
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <string>
#include <vector>

namespace tea::torch_ops {

using torch::stable::Tensor;

class Stack {
 public:
  Stack(StableIValue* values, uint64_t count)
      : first_(values), values_(values), end_(values + count) {}

  Tensor tensor() { return torch::stable::detail::to<Tensor>(*values_++); }
  std::optional<Tensor> maybe_tensor() {
    if (at_end()) return {};
    return torch::stable::detail::to<std::optional<Tensor>>(*values_++);
  }
  std::vector<Tensor> tensors() {
    return torch::stable::detail::to<std::vector<Tensor>>(*values_++);
  }
  int64_t integer() { return at_end() ? -1 : torch::stable::detail::to<int64_t>(*values_++); }
  // Releases a list without reading it.
  void drop_list() {
    TORCH_ERROR_CODE_CHECK(
        torch_delete_list(torch::stable::detail::to<StableListHandle>(*values_++)));
  }
  bool flag() { return !at_end() && torch::stable::detail::to<bool>(*values_++); }
  double number() { return at_end() ? 0 : torch::stable::detail::to<double>(*values_++); }
  std::optional<double> maybe_number() {
    if (at_end()) return {};
    return torch::stable::detail::to<std::optional<double>>(*values_++);
  }
  // Not to<std::string>, which leaks in torch 2.10 and 2.11.
  std::string text() {
    if (at_end()) return {};
    const auto handle = torch::stable::detail::to<StringHandle>(*values_++);
    size_t length = 0;
    const char* data = nullptr;
    TORCH_ERROR_CODE_CHECK(torch_string_length(handle, &length));
    TORCH_ERROR_CODE_CHECK(torch_string_c_str(handle, &data));
    std::string out(data, length);
    TORCH_ERROR_CODE_CHECK(torch_delete_string(handle));
    return out;
  }

  // Writes the results from the first entry on, when all arguments have been read.
  template <class... T>
  void give(const T&... results) const {
    StableIValue* to = first_;
    ((*to++ = torch::stable::detail::from(results)), ...);
  }

 private:
  bool at_end() const { return values_ == end_; }
  StableIValue* const first_;
  StableIValue* values_;
  StableIValue* const end_;
};

}  // namespace tea::torch_ops
