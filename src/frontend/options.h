// The options of attention as C++ types, derived from options.def.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <type_traits>

#include "frontend/tensor.h"

namespace tea::frontend {

// The C++ type of each kind of option; T is the tensor type of a framework. An option that the
// caller leaves out is absent, false, empty, 0 for a Number and -1 for an Integer.
template <class T>
struct OptionTypes {
  using Tensor = T;
  using OptionalTensor = std::optional<T>;
  using Text = std::string;
  using Flag = bool;
  using Integer = int64_t;
  using Number = double;
  using OptionalNumber = std::optional<double>;
};

template <class T>
struct OptionsOf {
#define TEA_OPTION(kind, name, default_text) typename OptionTypes<T>::kind name;
#include "frontend/options.def"
};
// With tensors as this layer sees them. They point into the framework's tensors, which must live as
// long.
using Options = OptionsOf<Tensor>;

// Options with each tensor replaced by view(name, tensor).
template <class T, class View>
Options with_views(const OptionsOf<T>& options, const View& view) {
  const auto convert = [&](const char* name, const auto& x) {
    using X = std::decay_t<decltype(x)>;
    if constexpr (std::is_same_v<X, T>)
      return view(name, x);
    else if constexpr (std::is_same_v<X, std::optional<T>>)
      return x ? std::optional<Tensor>(view(name, *x)) : std::nullopt;
    else
      return x;
  };
  return {
#define TEA_OPTION(kind, name, default_text) convert(#name, options.name),
#include "frontend/options.def"
  };
}

// The table in PyTorch's schema language: "Tensor q, ..., str format=\"bhsd\", ...".
const std::string& schema();

}  // namespace tea::frontend
