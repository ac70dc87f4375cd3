// The engine interface: a name, what it knows, and one function that makes a problem ready to run
// or says why not.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <variant>

#include "core/device.h"
#include "core/tensors.h"

namespace tea {

// A problem made ready on one device. Immutable; called from any thread.
struct Executable {
  const char* yields = nullptr;  // why a later engine should run this if one can
  virtual ~Executable() = default;
  virtual void forward(const Run& run) const = 0;
  virtual void backward(const Run& run) const = 0;
};

struct Refusal {
  std::string why;
};
using Attempt = std::variant<Refusal, std::unique_ptr<Executable>>;

// A field an engine understands. For enums and bits, `values` has bit n set for each value (or bit)
// n that it understands; other kinds ignore it.
struct Known {
  std::string_view field;
  uint32_t values = ~uint32_t{0};
};

// All values of an enum, or all bits, below n. A value that is added later is not among them.
constexpr uint32_t below(int n) { return (uint32_t{1} << n) - 1; }

// A problem that uses a field or value outside known_fields() is refused before plan() is called,
// so that an option can never be ignored, and a new one needs no change in the engines that lack
// it.
struct Engine {
  std::string_view name;
  std::span<const Known> (*known_fields)();
  Attempt (*plan)(const Problem&, const Device&);
  // Bytes one execution needs at most, on any device; NULL: none.
  uint64_t (*workspace)(const Problem&, const Geometry&, Direction) = nullptr;
  bool only_by_name = false;

  Attempt attempt(const Problem& problem, const Device& device) const;
};

}  // namespace tea

#define TEA_REFUSE_IF(condition, why)            \
  do {                                           \
    if (condition) return ::tea::Refusal{(why)}; \
  } while (0)
