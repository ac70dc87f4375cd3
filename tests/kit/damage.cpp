// Detects forbidden writes of an engine to the given memory.
#include <cmath>

#include "kit/codec.h"
#include "kit/inputs.h"

namespace tea::kit {
namespace {

// Rows past the lengths: zero, but minus infinity for LSE and MAX.
double padding_value(tea_tensor t) { return t == TEA_LSE || t == TEA_MAX ? -INFINITY : 0; }

enum Mark : uint8_t { kHole, kPadding, kValid };

}  // namespace

bool Inputs::is_output(size_t storage, Written direction) const {
  for (const Place& place : places_)
    if (place.used && static_cast<size_t>(place.storage) == storage && place.written == direction)
      return true;
  return false;
}

// One storage of outputs: what no tensor covers is untouched, padding is as the contract says.
void Inputs::check_storage(size_t s, Written direction, std::vector<std::string>& out) const {
  const Storage& storage = storages_[s];
  std::vector<Mark> marks;
  int bytes = 1;
  for (const Place& place : places_) {
    if (!place.used || static_cast<size_t>(place.storage) != s || place.written != direction)
      continue;
    bytes = bytes_of(place.dtype);
    marks.resize(storage.size() / static_cast<size_t>(bytes), kHole);
    const auto mark = [&](int64_t i) -> Mark& {
      return marks[static_cast<size_t>(place.base + i)];
    };
    place.each([&](int64_t i) { mark(i) = kPadding; });
    if (place.kind == Kind::kFlat)
      place.each([&](int64_t i) { mark(i) = kValid; });
    else
      each_valid(place, problem_, extents_, [&](int64_t i, const Index&) { mark(i) = kValid; });
    int64_t wrong = 0;
    place.each([&](int64_t i) {
      if (mark(i) == kPadding &&
          load(storage.data(), place.dtype, place.base + i) != padding_value(place.id) && !wrong++)
        out.push_back(std::string(tensor_name(place.id)) + " padding element " + std::to_string(i) +
                      " is " + std::to_string(load(storage.data(), place.dtype, place.base + i)) +
                      ", must be " + std::to_string(padding_value(place.id)));
    });
  }
  for (size_t i = 0; i < marks.size(); ++i) {
    const auto width = static_cast<size_t>(bytes);
    if (marks[i] == kHole &&
        std::memcmp(storage.data() + i * width, before_[s].data() + i * width, width) != 0) {
      out.push_back("memory between the elements of an output was written, element " +
                    std::to_string(i));
      return;
    }
  }
}

std::vector<std::string> Inputs::damage(Written direction) const {
  std::vector<std::string> out;
  for (size_t s = 0; s < storages_.size(); ++s) {
    std::string names;
    for (const Place& place : places_)
      if (place.used && static_cast<size_t>(place.storage) == s)
        names += (names.empty() ? "" : "+") + std::string(tensor_name(place.id));
    if (const auto where = storages_[s].damage())
      out.push_back("redzone of " + names + " was written at byte " + std::to_string(*where) +
                    " of " + std::to_string(storages_[s].size()));
    if (is_output(s, direction))
      check_storage(s, direction, out);
    else if (storages_[s].size() &&
             std::memcmp(storages_[s].data(), before_[s].data(), before_[s].size()) != 0)
      out.push_back(names + " is not an output here and was written");
  }
  if (const auto where = workspace_.damage())
    out.push_back("redzone of the workspace was written at byte " + std::to_string(*where));
  // With dropout, the scale of S in the FP8 cases (192) may be too large for E4M3, which is
  // reported.
  const int32_t allowed = problem_.is_fp8() && problem_.drops() ? TEA_STATUS_SATURATED : 0;
  if (status_ & ~allowed)
    out.push_back("status is " + std::to_string(status_) + " for valid metadata");
  return out;
}

bool Inputs::untouched() const {
  for (size_t s = 0; s < storages_.size(); ++s) {
    const Storage& storage = storages_[s];
    if (storage.damage() ||
        (storage.size() && std::memcmp(storage.data(), before_[s].data(), before_[s].size()) != 0))
      return false;
  }
  return !workspace_.damage() && status_ == 0;
}

std::vector<uint8_t> Inputs::output_bytes(Written direction) const {
  std::vector<uint8_t> out;
  for (const Place& place : places_) {
    if (!place.used || place.written != direction) continue;
    const int64_t width = bytes_of(place.dtype);
    const auto add = [&](int64_t first, int64_t elements) {
      const uint8_t* const from = at(place) + (place.base + first) * width;
      out.insert(out.end(), from, from + elements * width);
    };
    place.each_row([&](int64_t first) {
      if (place.stride[3] == 1) return add(first, place.shape[3]);
      for (int64_t d = 0; d < place.shape[3]; ++d) add(first + d * place.stride[3], 1);
    });
  }
  return out;
}

}  // namespace tea::kit
