// The arguments of an operator as PyTorch hands them over, read in order, and its results. Every
// argument must be read: each one that is not would leak.
#pragma once
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <string>

namespace tea::torch_ops {

using torch::stable::Tensor;

class Stack {
 public:
  explicit Stack(StableIValue* values) : values_(values) {}

  Tensor tensor() { return torch::stable::detail::to<Tensor>(*values_++); }
  std::optional<Tensor> maybe_tensor() {
    return torch::stable::detail::to<std::optional<Tensor>>(*values_++);
  }
  int64_t integer() { return torch::stable::detail::to<int64_t>(*values_++); }
  bool flag() { return torch::stable::detail::to<bool>(*values_++); }
  double number() { return torch::stable::detail::to<double>(*values_++); }
  std::optional<double> maybe_number() {
    return torch::stable::detail::to<std::optional<double>>(*values_++);
  }
  // Not by to<std::string>: in torch 2.10 and 2.11 it leaks.
  std::string text() {
    const auto handle = torch::stable::detail::to<StringHandle>(*values_++);
    size_t length = 0;
    const char* data = nullptr;
    TORCH_ERROR_CODE_CHECK(torch_string_length(handle, &length));
    TORCH_ERROR_CODE_CHECK(torch_string_c_str(handle, &data));
    std::string out(data, length);
    TORCH_ERROR_CODE_CHECK(torch_delete_string(handle));
    return out;
  }

 private:
  StableIValue* values_;
};

// The results take the places of the arguments, from the first on.
template <class... T>
void give(StableIValue* values, const T&... results) {
  ((*values++ = torch::stable::detail::from(results)), ...);
}

}  // namespace tea::torch_ops
