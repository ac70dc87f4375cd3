// Writing text through the paged KV cache.
#include "generate.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "progress.h"

namespace gpt {
namespace {

uint8_t sample(In logits, float temperature, Random& random) {
  const float top = *std::max_element(logits.begin(), logits.end());
  std::vector<float> chance;
  float sum = 0;
  for (const float x : logits) chance.push_back(sum += std::exp((x - top) / temperature));
  const auto pick = std::upper_bound(chance.begin(), chance.end(), random.uniform() * sum);
  return static_cast<uint8_t>(std::min(pick - chance.begin(), std::ssize(chance) - 1));
}

// Feeds new bytes; gives the logits after the last one.
class Decoder {
 public:
  Decoder(const Model& model, int64_t capacity) : model_(model), cache_(model.config, capacity) {}

  In feed(Bytes bytes, Generation& to) {
    Activations a(model_.config, std::ssize(bytes));
    model_.forward(
        bytes, [&](int layer, In qkv, Out o) { cache_.attend(layer, qkv, o); }, a);
    cache_.advance(std::ssize(bytes));
    to.bytes.insert(to.bytes.end(), bytes.begin(), bytes.end());
    to.logits.insert(to.logits.end(), a.logits.begin(), a.logits.end());
    return In(to.logits).last(model_.config.vocabulary);
  }
  int64_t pages() const { return cache_.pages(); }

 private:
  const Model& model_;
  KvCache cache_;
};

}  // namespace

Generation generate(const Model& model, const std::string& prompt,
                    const std::function<void(uint8_t)>& show) {
  const Config& c = model.config;
  Generation out;
  Random random(c.seed);
  Decoder decoder(model, std::ssize(prompt) + c.generated);
  out.pages = decoder.pages();

  Stopwatch prefill;
  In logits = decoder.feed({reinterpret_cast<const uint8_t*>(prompt.data()), prompt.size()}, out);
  out.prefill_seconds = prefill.seconds();
  Stopwatch decode;
  for (int i = 1;; ++i) {
    const uint8_t next = sample(logits, c.temperature, random);
    show(next);
    if (i == c.generated) {
      out.bytes.push_back(next);
      break;
    }
    logits = decoder.feed({&next, 1}, out);
  }
  out.decode_seconds = decode.seconds();
  return out;
}

double difference_without_cache(const Model& model, const Generation& generation) {
  const Bytes bytes = Bytes(generation.bytes).first(generation.bytes.size() - 1);
  const CausalAttention attention(model.config, 1, std::ssize(bytes));
  Activations a(model.config, std::ssize(bytes));
  model.forward(
      bytes, [&](int layer, In qkv, Out o) { attention.forward(qkv, o, a.blocks[layer].lse); }, a);
  float worst = 0, largest = 0;
  for (size_t i = 0; i < a.logits.size(); ++i) {
    const float difference = std::abs(a.logits[i] - generation.logits[i]);
    if (std::isnan(difference)) return std::numeric_limits<double>::infinity();
    worst = std::max(worst, difference);
    largest = std::max(largest, std::abs(a.logits[i]));
  }
  return worst / largest;
}

}  // namespace gpt
