// Every size and rate of the demo in one table, so that it grows with the engine that runs it.
#pragma once
#include <cstdint>

namespace gpt {

struct Config {
  // The model.
  int layers = 4;
  int model_dim = 128;
  int heads_q = 4, heads_kv = 2;  // grouped-query attention; heads_q a power of two (check.cpp)
  int head_dim = 32;
  int hidden_dim = 512;
  int vocabulary = 256;  // bytes

  // Training. A step is the sum of `shards` equal parts in a fixed order, whatever number of
  // threads computed them: the loss is the same on every run.
  int context = 128;
  int batch = 16;
  int shards = 4;
  int steps = 1200;
  float warm_up = 0.05f;  // share of the steps
  float rate = 5e-3f, last_rate = 5e-4f;
  float decay = 0.1f;
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
