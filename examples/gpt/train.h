// Training: one step at a time, each the sum of shards that run in parallel.
#pragma once
#include <vector>

#include "model.h"
#include "optimizer.h"

namespace gpt {

class Trainer {
 public:
  Trainer(Model& model, const Text& text);
  // Losses are means in nats per byte.
  double gradient();  // of the loss of a fresh batch, which is the result
  double step();      // the same, then updates the model
  // The loss over at most `windows` windows, spread over the text.
  double evaluate(Bytes text, int64_t windows);

  const CausalAttention& attention() const { return attention_; }
  // Of one shard, as the last call left them.
  const Activations& activations() const { return shards_.front().activations; }

 private:
  struct Shard {
    Batch batch;
    Activations activations;
    std::vector<float> gradient;
    Random random;
    double loss = 0;
  };
  double forward(Shard& shard, float scale) const;
  double sum_of_losses() const;

  Model& model_;
  const Text& text_;
  CausalAttention attention_;  // one plan for all shards
  Optimizer optimizer_;
  std::vector<Shard> shards_;
};

}  // namespace gpt
