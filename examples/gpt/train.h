// Training. The shards of a step run in parallel.
#pragma once
#include <vector>

#include "model.h"
#include "optimizer.h"

namespace gpt {

class Trainer {
 public:
  Trainer(Model& model, const Text& text);
  // Losses are means in nats per byte.
  double gradient();  // computes the gradient for a new batch; returns the loss
  double step();      // calls gradient(), then updates the model
  // The loss over as many windows as fit the text without overlap and fill whole batches.
  double evaluate(Bytes text);

  const CausalAttention& attention() const { return attention_; }
  // The activations of the first shard after the last call.
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
