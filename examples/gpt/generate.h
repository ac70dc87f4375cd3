// Writing text with a trained model through the paged KV cache.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "model.h"

namespace gpt {

struct Generation {
  std::vector<uint8_t> bytes;  // the prompt and what follows
  std::vector<float> logits;   // [bytes.size() - 1, 256]: of each byte but the last
  double prefill_seconds = 0, decode_seconds = 0;
  int64_t pages = 0;
};

// The whole prompt in one pass, then one byte at a time; `show` gets each new one.
Generation generate(const Model& model, const std::string& prompt,
                    const std::function<void(uint8_t)>& show);

// The largest difference of a logit to that of one forward pass over the whole text, without a
// cache, as a share of the largest logit.
double difference_without_cache(const Model& model, const Generation& generation);

}  // namespace gpt
