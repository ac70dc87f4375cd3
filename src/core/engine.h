// The engine interface: a name, the known fields, and one function that returns an executable for a
// problem or the reason of its refusal.
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

// An executable for a problem on one device. Immutable; called from any thread.
struct Executable {
  const char* yields = nullptr;  // why a later engine is preferred if one accepts
  virtual ~Executable() = default;
  virtual void forward(const Run& run) const = 0;
  virtual void backward(const Run& run) const = 0;
  // Whether runs of a direction may have `accumulate`.
  virtual bool accumulates(Direction) const { return false; }
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

// Whether a field is a size, a stride or the alignment. Every engine reads these, so that no engine
// lists them. A stride counts only with the tensor that it is of, whose own field is listed.
bool is_geometry(std::string_view field);

// All values of an enum, or all bits, below n. Values that are added later are not included.
constexpr uint32_t below(int n) { return (uint32_t{1} << n) - 1; }

// A problem that uses an option or value outside known_fields() is refused before plan() is called.
// An option can therefore never be ignored, and a new option needs no change in engines without it.
struct Engine {
  std::string_view name;
  std::span<const Known> (*known_fields)();
  Attempt (*plan)(const Problem&, const Device&);
  // The maximum bytes of workspace of one execution, on any device; NULL: none.
  uint64_t (*workspace)(const Problem&, const Geometry&, Direction) = nullptr;
  bool only_by_name = false;

  Attempt attempt(const Problem& problem, const Device& device) const;
};

}  // namespace tea

#define TEA_REFUSE_IF(condition, why)            \
  do {                                           \
    if (condition) return ::tea::Refusal{(why)}; \
  } while (0)
