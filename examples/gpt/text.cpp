// The text: reading, counting and cutting it.
#include "text.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <fstream>
#include <iterator>
#include <stdexcept>

namespace gpt {

Text::Text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot read " + path);
  bytes_.assign(std::istreambuf_iterator<char>(file), {});
}

double unigram_entropy(Bytes bytes) {
  std::array<double, 256> count = {};
  for (const uint8_t byte : bytes) ++count[byte];
  double nats = 0;
  for (const double n : count) {
    if (n > 0) nats -= n * std::log(n / static_cast<double>(bytes.size()));
  }
  return nats / static_cast<double>(bytes.size());
}

void Batch::set(int64_t window, Bytes text) {
  std::copy_n(text.begin(), length, bytes.begin() + window * length);
  std::copy_n(text.begin() + 1, length, targets.begin() + window * length);
}

void Batch::draw(Bytes text, Random& random) {
  for (int64_t window = 0; window < std::ssize(bytes) / length; ++window) {
    set(window, text.subspan(random.below(std::ssize(text) - length), length + 1));
  }
}

}  // namespace gpt
