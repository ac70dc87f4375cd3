// Attention through the C API of TE Attention.
#include "attention.h"

#include <stdexcept>

#include "te_attention_ops.h"

namespace gpt {
namespace {

constexpr int kHost = -1;

// The library's message names the argument, the value seen and the value needed.
void check(tea_status status) {
  if (status != TEA_OK) throw std::runtime_error(tea_error());
}

// Text results come in two calls: how long, then the text.
template <class Print>
std::string text_of(Print print) {
  size_t needed = 0;
  check(print(nullptr, 0, &needed));
  std::string text(needed, '\0');
  check(print(text.data(), text.size(), &needed));
  text.resize(needed - 1);
  return text;
}

// The common part of the three uses of attention in the demo. The window is the length of the
// training sequences, so that a longer text looks like what the model was trained on; ALiBi tells
// positions apart, so that no other encoding of them is needed.
tea_problem describe(const Config& config) {
  tea_problem p = {};
  p.struct_size = sizeof p;
  p.dtype = TEA_FP32;
  p.heads_q = config.heads_q;
  p.heads_kv = config.heads_kv;
  p.dim_qk = config.head_dim;
  p.causal = 1;
  p.window_left = config.context;  // the bound + 1
  p.alibi = TEA_ALIBI_STANDARD;
  return p;
}

tea_problem describe_training(const Config& config, int64_t batch, int64_t length) {
  tea_problem p = describe(config);
  p.training = 1;
  p.deterministic = 1;
  p.batch = batch;
  p.seqlen_q = p.seqlen_kv = length;
  p.q = {length * config.qkv_dim(), config.qkv_dim(), config.head_dim};
  p.k = p.v = p.dq = p.dk = p.dv = p.q;
  return p;
}

// One query sequence of `tokens` rows at the end of the sequence in the cache.
tea_problem describe_cached(const Config& config, int64_t tokens) {
  tea_problem p = describe(config);
  p.kv_form = TEA_PAGED;
  p.page_size = config.page_size;
  p.bottom_right = 1;
  p.seqlen_q = tokens;
  p.q = {tokens * config.qkv_dim(), config.qkv_dim(), config.head_dim};
  return p;
}

// The C API does not tell inputs from outputs in its array of pointers.
struct Tensors {
  void* at[TEA_TENSOR_COUNT] = {};
  void set(tea_tensor name, const void* data) { at[name] = const_cast<void*>(data); }
  void set_qkv(const Config& config, const float* qkv) {
    set(TEA_Q, qkv);
    set(TEA_K, qkv + config.q_dim());
    set(TEA_V, qkv + config.q_dim() + config.kv_dim());
  }
  tea_run run() const {
    tea_run run = {};
    run.struct_size = sizeof run;
    run.tensors = at;
    run.tensor_count = TEA_TENSOR_COUNT;
    return run;
  }
};

// Memory of this thread, kept from call to call, aligned as the library asks.
void bring_workspace(tea_run& run, uint64_t bytes) {
  constexpr uint64_t kAlignment = 256;
  thread_local std::vector<std::byte> memory;
  if (memory.size() < bytes + kAlignment) memory.resize(bytes + kAlignment);
  void* start = memory.data();
  size_t space = memory.size();
  run.workspace = std::align(kAlignment, bytes, start, space);
  run.workspace_bytes = bytes;
}

}  // namespace

Plan::Plan(const tea_problem& problem) : problem_(problem) {
  tea_plan* plan = nullptr;
  check(tea_plan_create(&problem, kHost, nullptr, &plan));
  plan_.reset(plan);
}

void Plan::forward(tea_run& run) const {
  uint64_t bytes = 0;
  check(tea_workspace_bound(&problem_, &run, &bytes, nullptr));
  bring_workspace(run, bytes);
  check(tea_forward(plan_.get(), &run));
}

void Plan::backward(tea_run& run) const {
  uint64_t bytes = 0;
  check(tea_workspace_bound(&problem_, &run, nullptr, &bytes));
  bring_workspace(run, bytes);
  check(tea_backward(plan_.get(), &run));
}

CausalAttention::CausalAttention(const Config& config, int64_t batch, int64_t length)
    : config_(config), problem_(describe_training(config, batch, length)), plan_(problem_) {}

void CausalAttention::forward(In qkv, Out o, Out lse) const {
  Tensors tensors;
  tensors.set_qkv(config_, qkv.data());
  tensors.set(TEA_O, o.data());
  tensors.set(TEA_LSE, lse.data());
  tea_run run = tensors.run();
  plan_.forward(run);
}

void CausalAttention::backward(In qkv, In o, In lse, In dout, Out dqkv) const {
  Tensors tensors;
  tensors.set_qkv(config_, qkv.data());
  tensors.set(TEA_O, o.data());
  tensors.set(TEA_LSE, lse.data());
  tensors.set(TEA_DOUT, dout.data());
  tensors.set(TEA_DQ, dqkv.data());
  tensors.set(TEA_DK, dqkv.data() + config_.q_dim());
  tensors.set(TEA_DV, dqkv.data() + config_.q_dim() + config_.kv_dim());
  tea_run run = tensors.run();
  plan_.backward(run);
}

std::string CausalAttention::text() const {
  return text_of([&](char* buffer, size_t capacity, size_t* needed) {
    return tea_problem_print(&problem_, buffer, capacity, needed);
  });
}

std::string CausalAttention::explain() const {
  return text_of([&](char* buffer, size_t capacity, size_t* needed) {
    return tea_explain(&problem_, kHost, buffer, capacity, needed);
  });
}

KvCache::KvCache(const Config& config, int64_t capacity) : config_(config) {
  // Backwards, to show that pages may lie anywhere in the pool.
  const int64_t pages = (capacity + config.page_size - 1) / config.page_size;
  for (int64_t page = pages; page-- > 0;) table_.push_back(static_cast<int32_t>(page));
  const std::vector<float> pool(pages * config.page_size * config.kv_dim());
  k_.assign(config.layers, pool);
  v_.assign(config.layers, pool);
}

void KvCache::append(int layer, In qkv, int64_t tokens) {
  const int32_t cu_new[] = {0, static_cast<int32_t>(tokens)};
  const int32_t cu_cached[] = {0, static_cast<int32_t>(length_ + tokens)};
  tea_kv_append args = {};
  args.struct_size = sizeof args;
  args.dtype = TEA_FP32;
  args.new_form = TEA_DENSE;
  args.new_k = qkv.data() + config_.q_dim();
  args.new_v = qkv.data() + config_.q_dim() + config_.kv_dim();
  args.new_k_stride = {tokens * config_.qkv_dim(), config_.qkv_dim(), config_.head_dim};
  args.new_v_stride = args.new_k_stride;
  args.k_cache = k_[layer].data();
  args.v_cache = v_[layer].data();
  args.page_table = table_.data();
  args.cu_new = cu_new;
  args.cu_cached = cu_cached;
  args.batch = 1;
  args.heads = config_.heads_kv;
  args.dim_k = args.dim_v = config_.head_dim;
  args.max_new = tokens;
  args.pages = args.pages_per_sequence = pages();
  args.page_size = config_.page_size;
  check(tea_kv_cache_append(&args, kHost, nullptr));
}

void KvCache::attend(int layer, In qkv, Out o) {
  const int64_t tokens = std::ssize(qkv) / config_.qkv_dim();
  append(layer, qkv, tokens);
  const int32_t cu_seqlens_kv[] = {0, static_cast<int32_t>(length_ + tokens)};
  Tensors tensors;
  tensors.set(TEA_Q, qkv.data());
  tensors.set(TEA_K, k_[layer].data());
  tensors.set(TEA_V, v_[layer].data());
  tensors.set(TEA_O, o.data());
  tensors.set(TEA_CU_SEQLENS_KV, cu_seqlens_kv);
  tensors.set(TEA_TABLE_K, table_.data());
  tensors.set(TEA_TABLE_V, table_.data());
  tea_run run = tensors.run();
  run.batch = 1;
  run.max_kv = pages() * config_.page_size;
  run.pages_k = run.pages_v = pages();
  // The library keeps plans by problem: from the second token on this is a look-up.
  Plan(describe_cached(config_, tokens)).forward(run);
}

}  // namespace gpt
