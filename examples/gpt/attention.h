// Attention through the C API of TE Attention: describe a problem, plan it once, run the plan many
// times. Nothing else in the demo knows the library.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "config.h"
#include "matmul.h"
#include "te_attention.h"

namespace gpt {

// A plan, released at the end. Immutable: any number of threads may run it.
class Plan {
 public:
  explicit Plan(const tea_problem& problem);
  const char* engine() const { return tea_plan_engine(plan_.get()); }
  void forward(tea_run& run) const;
  void backward(tea_run& run) const;

 private:
  struct Release {
    void operator()(tea_plan* plan) const { tea_plan_release(plan); }
  };
  std::unique_ptr<tea_plan, Release> plan_;
  tea_problem problem_;
};

// Causal self-attention of `batch` sequences of `length` tokens. The features of a token are
// [q heads | k heads | v heads], as one matrix product writes them: a layout is a choice of
// strides.
class CausalAttention {
 public:
  CausalAttention(const Config& config, int64_t batch, int64_t length);
  void forward(In qkv, Out o, Out lse) const;  // lse [batch, heads_q, length]
  void backward(In qkv, In o, In lse, In dout, Out dqkv) const;

  const char* engine() const { return plan_.engine(); }
  std::string text() const;     // the problem, as one line
  std::string explain() const;  // what each engine says about it

 private:
  Config config_;
  tea_problem problem_;
  Plan plan_;
};

// The keys and values of one sequence, one pool of pages per layer.
class KvCache {
 public:
  KvCache(const Config& config, int64_t capacity);
  // Stores k and v of the new tokens, then attends from their q to every token stored.
  void attend(int layer, In qkv, Out o);
  // All layers have seen the new tokens.
  void advance(int64_t tokens) { length_ += tokens; }
  int64_t pages() const { return static_cast<int64_t>(table_.size()); }

 private:
  void append(int layer, In qkv, int64_t tokens);

  Config config_;
  int64_t length_ = 0;
  std::vector<int32_t> table_;  // logical page -> page of the pool
  std::vector<std::vector<float>> k_, v_;
};

}  // namespace gpt
