// Training.
#include "train.h"

#include "parallel.h"

namespace gpt {

Trainer::Trainer(Model& model, const Text& text)
    : model_(model),
      text_(text),
      attention_(model.config, model.config.shard_batch(), model.config.context),
      optimizer_(model.config, model.layout.size, model.layout.matrices) {
  const Config& c = model.config;
  Random seeds(c.seed);
  for (int i = 0; i < c.shards; ++i) {
    shards_.push_back({Batch(c.shard_batch(), c.context), Activations(c, c.shard_tokens()),
                       std::vector<float>(model.layout.size), Random(seeds.bits())});
  }
}

// Returns the sum of the losses and replaces the logits by the gradient of `scale` times that sum.
double Trainer::forward(Shard& shard, float scale) const {
  Activations& a = shard.activations;
  const Attend attend = [&](int layer, In qkv, Out o) {
    attention_.forward(qkv, o, a.blocks[layer].lse);
  };
  model_.forward(shard.batch.bytes, attend, a);
  return cross_entropy(shard.batch.targets, scale, a.logits);
}

double Trainer::sum_of_losses() const {
  double sum = 0;
  for (const Shard& shard : shards_) sum += shard.loss;
  return sum;
}

double Trainer::gradient() {
  const int tokens = model_.config.batch * model_.config.context;
  parallel(model_.config.shards, [&](int i) {
    Shard& shard = shards_[i];
    shard.gradient.assign(shard.gradient.size(), 0);
    shard.batch.draw(text_.training(), shard.random);
    shard.loss = forward(shard, 1 / static_cast<float>(tokens));
    model_.backward(shard.batch.bytes, attention_, shard.activations, shard.gradient);
  });
  for (size_t i = 1; i < shards_.size(); ++i) add(shards_[i].gradient, shards_[0].gradient);
  return sum_of_losses() / tokens;
}

double Trainer::step() {
  const double loss = gradient();
  optimizer_.update(shards_[0].gradient, model_.weights);
  return loss;
}

double Trainer::evaluate(Bytes text) {
  const Config& c = model_.config;
  const int64_t per_batch = c.shard_batch(), length = c.context;
  const int64_t batches = (std::ssize(text) - 1) / length / per_batch;
  const int64_t pitch = (std::ssize(text) - 1) / (batches * per_batch);  // at least `length`
  parallel(c.shards, [&](int i) {
    Shard& shard = shards_[i];
    shard.loss = 0;
    for (int64_t batch = i; batch < batches; batch += c.shards) {
      for (int64_t w = 0; w < per_batch; ++w) {
        shard.batch.set(w, text.subspan((batch * per_batch + w) * pitch, length + 1));
      }
      shard.loss += forward(shard, 1);
    }
  });
  return sum_of_losses() / static_cast<double>(batches * per_batch * length);
}

}  // namespace gpt
