// One trained layer's attention against the oracle.
#include "check.h"

#include <cmath>

#include "kit/bounds.h"

namespace gpt {
namespace {

namespace oracle = tea::oracle;

// A tensor of the demo, [batch, length, ..., heads, dim] with `pitch` features per token. logical()
// converts it to the oracle's layout, [batch][heads][length][dim].
struct View {
  const std::vector<float>& data;
  int64_t pitch, start, heads, dim;
};

std::vector<double> logical(const Config& c, const View& view) {
  std::vector<double> out;
  const int64_t batch = std::ssize(view.data) / (c.context * view.pitch);
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t h = 0; h < view.heads; ++h)
      for (int64_t t = 0; t < c.context; ++t)
        for (int64_t d = 0; d < view.dim; ++d)
          out.push_back(
              view.data[(b * c.context + t) * view.pitch + view.start + h * view.dim + d]);
  return out;
}

View heads_of_q(const Config& c, const std::vector<float>& packed) {
  return {packed, c.qkv_dim(), 0, c.heads_q, c.head_dim};
}
View heads_of_k(const Config& c, const std::vector<float>& packed) {
  return {packed, c.qkv_dim(), c.q_dim(), c.heads_kv, c.head_dim};
}
View heads_of_v(const Config& c, const std::vector<float>& packed) {
  return {packed, c.qkv_dim(), c.q_dim() + c.kv_dim(), c.heads_kv, c.head_dim};
}
View heads_of_o(const Config& c, const std::vector<float>& o) {
  return {o, c.q_dim(), 0, c.heads_q, c.head_dim};
}

// The problem that attention.cpp describes, as input of the oracle.
oracle::Case describe(const Config& c, const Activations::Block& block) {
  oracle::Case out;
  out.batch = c.shard_batch();
  out.heads_q = c.heads_q, out.heads_kv = c.heads_kv;
  out.dim_qk = out.dim_v = c.head_dim;
  out.max_q = out.max_kv = c.context;
  out.length_q.assign(out.batch, c.context);
  out.length_kv = out.length_q;
  out.q = logical(c, heads_of_q(c, block.qkv));
  out.k = logical(c, heads_of_k(c, block.qkv));
  out.v = logical(c, heads_of_v(c, block.qkv));
  out.dout = logical(c, heads_of_o(c, block.dout));
  out.o_stored = logical(c, heads_of_o(c, block.o));
  out.causal = true;
  out.window_left = c.context - 1;
  out.scale = 1 / std::sqrt(static_cast<double>(c.head_dim));
  for (int64_t b = 0; b < out.batch; ++b)  // the published slopes of a power of two of heads
    for (int h = 1; h <= c.heads_q; ++h) out.slopes.push_back(std::exp2(-8.0 * h / c.heads_q));
  return out;
}

Compared compare(const std::string& name, const oracle::Tensor& expected,
                 const std::vector<double>& actual) {
  Compared out = {name, 0, 0, expected.value.size() == actual.size()};
  if (!out.right) return out;
  for (size_t i = 0; i < actual.size(); ++i) {
    out.error = std::max(out.error, std::abs(actual[i] - expected.value[i]));
    out.share = std::max(out.share, expected.error(i, actual[i]));
    out.right = out.right && expected.accepts(i, actual[i]);
  }
  return out;
}

}  // namespace

std::vector<Compared> compare_with_oracle(const Config& c, const Activations::Block& block) {
  const oracle::Result expected =
      oracle::solve(describe(c, block), oracle::precision(oracle::Type::kFp32));
  return {compare("O", expected.o, logical(c, heads_of_o(c, block.o))),
          compare("LSE", expected.lse, {block.lse.begin(), block.lse.end()}),
          compare("dQ", expected.dq, logical(c, heads_of_q(c, block.dqkv))),
          compare("dK", expected.dk, logical(c, heads_of_k(c, block.dqkv))),
          compare("dV", expected.dv, logical(c, heads_of_v(c, block.dqkv)))};
}

}  // namespace gpt
