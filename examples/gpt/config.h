// The model's sizes and the training parameters. They are chosen so that two cores with AVX2 train
// in less than a minute.
#pragma once
#include <cstdint>

namespace gpt {

struct Config {
  // The model.
  int layers = 3;
  int model_dim = 96;
  int heads_q = 4, heads_kv = 2;  // grouped-query attention; heads_q a power of two (check.cpp)
  int head_dim = 32;
  int hidden_dim = 384;
  int vocabulary = 256;  // bytes

  // Training. The gradient of a step is the sum over `shards` equal parts in a fixed order, so that
  // the loss does not depend on the number of threads.
  int context = 128;
  int batch = 8;
  int shards = 4;
  int steps = 800;
  float warm_up = 0.05f;  // fraction of the steps
  float rate = 6e-3f, last_rate = 6e-4f;
  float decay = 0.3f;
  uint64_t seed = 1;

  // Generation.
  int page_size = 16;
  int generated = 600;
  float temperature = 0.5f;

  int q_dim() const { return heads_q * head_dim; }
  int kv_dim() const { return heads_kv * head_dim; }
  int qkv_dim() const { return q_dim() + 2 * kv_dim(); }
  int shard_batch() const { return batch / shards; }
  int shard_tokens() const { return shard_batch() * context; }
};

}  // namespace gpt
