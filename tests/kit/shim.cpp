// The kit through C, for the Python tests: a case's inputs in memory, and its outputs compared.
#include <cstring>
#include <memory>

#include "core/boundary.h"
#include "kit/check.h"
#include "kit/draw.h"

using tea::kit::Inputs;
using tea::kit::Place;
using tea::kit::Poison;
using tea::kit::Report;
using tea::kit::Written;

namespace {

struct Opened {
  tea::kit::Case c;
  Inputs inputs;
  explicit Opened(const char* line) : c(tea::kit::Case::parse(line)), inputs(c) {}
};

}  // namespace

// The properties of a tensor for Python: rows as [batch or page, row, head, column], LSE as [batch,
// row, head], a bias as [batch, head, row, column]; strides in elements.
struct kit_tensor {
  void* data;
  int32_t used, dtype;  // a tea_dtype, 0 for integers
  int64_t shape[4], stride[4];
};

struct kit_sizes {
  int64_t batch, max_q, max_kv, origin[4];
};

#define KIT_API extern "C" __attribute__((visibility("default")))

KIT_API const char* kit_error() { return tea_error(); }

KIT_API tea_status kit_draw(uint64_t seed, char* line, size_t capacity) {
  return tea::guarded(
      [&] { tea::copy_text(tea::kit::draw(seed).text(), line, capacity, nullptr); });
}

KIT_API tea_status kit_open(const char* line, Opened** out) {
  return tea::guarded([&] { *out = new Opened(line); });
}

KIT_API void kit_close(Opened* opened) { delete opened; }

// The problem with every stride filled in, as text.
KIT_API tea_status kit_problem(const Opened* opened, char* text, size_t capacity) {
  return tea::guarded(
      [&] { tea::copy_text(opened->inputs.problem().text(), text, capacity, nullptr); });
}

KIT_API void kit_sizes_of(const Opened* opened, kit_sizes* out) {
  const auto& e = opened->inputs.extents();
  *out = {e.batch, e.max_q, e.max_kv, {}};
  std::memcpy(out->origin, opened->c.origin, sizeof out->origin);
}

// Outputs and unused memory become NaN, or 1e30; inputs are as they were.
KIT_API void kit_fill(Opened* opened, int32_t large) {
  opened->inputs.fill(large ? Poison::kLarge : Poison::kNan);
  opened->inputs.run(0);
}

KIT_API void kit_tensor_of(Opened* opened, int32_t index, kit_tensor* out) {
  const auto id = static_cast<tea_tensor>(index);
  const Place& place = opened->inputs.place(id);
  *out = {place.used ? opened->inputs.memory(id) : nullptr, place.used, place.dtype, {}, {}};
  std::memcpy(out->shape, place.shape.data(), sizeof out->shape);
  std::memcpy(out->stride, place.stride.data(), sizeof out->stride);
}

// The forbidden writes of one direction; empty: none. Then the current contents count as the
// state before the next direction.
KIT_API tea_status kit_damage(Opened* opened, int32_t backward, char* text, size_t capacity) {
  return tea::guarded([&] {
    std::string all;
    for (const auto& line :
         opened->inputs.damage(backward ? Written::kBackward : Written::kForward))
      all += line + "\n";
    opened->inputs.run(0);
    tea::copy_text(all, text, capacity, nullptr);
  });
}

// Every output against the oracle, at the precision of `engine`. Empty: all is right.
KIT_API tea_status kit_compare(const Opened* opened, const char* engine, char* text,
                               size_t capacity) {
  return tea::guarded([&] {
    Report report{opened->c.text(), engine, {}, {}};
    tea::kit::compare(opened->inputs, report);
    tea::copy_text(report.ok() ? "" : report.text(), text, capacity, nullptr);
  });
}
