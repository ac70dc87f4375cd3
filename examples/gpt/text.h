// The text: its bytes, the part held out from training, and how hard it is without a model.
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "random.h"

namespace gpt {

using Bytes = std::span<const uint8_t>;

class Text {
 public:
  explicit Text(const std::string& path);  // throws if it cannot be read
  Bytes all() const { return bytes_; }
  Bytes training() const { return all().first(bytes_.size() / 10 * 9); }
  Bytes held_out() const { return all().subspan(training().size()); }

 private:
  std::vector<uint8_t> bytes_;
};

// Nats per byte that are needed if only the frequencies of single bytes are known.
double unigram_entropy(Bytes bytes);

// Windows of a text, one after another, and for each byte the one that follows it.
struct Batch {
  Batch(int64_t windows, int64_t length_)
      : bytes(windows * length_), targets(bytes), length(length_) {}
  void set(int64_t window, Bytes text);  // length + 1 bytes
  void draw(Bytes text, Random& random);

  std::vector<uint8_t> bytes, targets;
  int64_t length;
};

}  // namespace gpt
