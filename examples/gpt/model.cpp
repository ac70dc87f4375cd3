// A byte-level GPT: where its weights lie, forward and backward.
#include "model.h"

#include <algorithm>
#include <cmath>

#include "random.h"

namespace gpt {
namespace {

Linear product(size_t elements_in, const Piece& w) {
  return {static_cast<int64_t>(elements_in) / w.rows, w.rows, w.cols};
}

}  // namespace

Layout::Layout(const Config& c) : blocks(c.layers) {
  const auto place = [&](Piece& piece, int64_t rows, int64_t cols, float spread) {
    piece = {size, rows, cols, spread};
    size += rows * cols;
  };
  const auto matrix = [&](Piece& piece, int64_t rows, int64_t cols, float scale) {
    place(piece, rows, cols, scale / std::sqrt(static_cast<float>(rows)));
  };
  // The additions to the residual stream start small, so that its sum over layers does not grow.
  const float residual = 1 / std::sqrt(2.0f * c.layers);
  place(embedding, c.vocabulary, c.model_dim, 1);
  for (Block& b : blocks) {
    matrix(b.qkv, c.model_dim, c.qkv_dim(), 1);
    matrix(b.out, c.q_dim(), c.model_dim, residual);
    matrix(b.up, c.model_dim, c.hidden_dim, 1);
    matrix(b.down, c.hidden_dim, c.model_dim, residual);
  }
  matrix(head, c.model_dim, c.vocabulary, 0.1f);
  matrices = size;
  for (Block& b : blocks) {
    place(b.norm1, 1, c.model_dim, 0);
    place(b.norm2, 1, c.model_dim, 0);
  }
  place(norm, 1, c.model_dim, 0);
}

Activations::Activations(const Config& c, int64_t tokens) : blocks(c.layers) {
  const auto size = [&](std::initializer_list<std::vector<float>*> list, int64_t features) {
    for (auto* each : list) each->resize(tokens * features);
  };
  for (Block& b : blocks) {
    size({&b.input, &b.normed1, &b.middle, &b.normed2}, c.model_dim);
    size({&b.qkv, &b.dqkv}, c.qkv_dim());
    size({&b.o, &b.dout}, c.q_dim());
    size({&b.up, &b.hidden}, c.hidden_dim);
    size({&b.lse}, c.heads_q);
  }
  size({&x, &normed, &dx, &narrow}, c.model_dim);
  size({&hidden}, c.hidden_dim);
  size({&logits}, c.vocabulary);
}

Model::Model(const Config& c) : config(c), layout(c), weights(layout.size, 1.0f) {
  Random random(c.seed);
  const auto fill = [&](const Piece& piece) {
    const float width = piece.spread * std::sqrt(12.0f);  // of the uniform distribution
    for (float& w : piece.in(Out(weights))) w = width * (random.uniform() - 0.5f);
  };
  fill(layout.embedding);
  for (const Layout::Block& b : layout.blocks)
    for (const Piece* piece : {&b.qkv, &b.out, &b.up, &b.down}) fill(*piece);
  fill(layout.head);
}

void Model::forward(Bytes bytes, const Attend& attend, Activations& a) const {
  embed(bytes, weight(layout.embedding), a.x);
  for (int layer = 0; layer < config.layers; ++layer) {
    const Layout::Block& w = layout.blocks[layer];
    Activations::Block& b = a.blocks[layer];
    b.input = a.x;
    rms_norm(b.input, weight(w.norm1), b.normed1);
    matmul(product(b.normed1.size(), w.qkv), b.normed1, weight(w.qkv), b.qkv);
    attend(layer, b.qkv, b.o);
    matmul(product(b.o.size(), w.out), b.o, weight(w.out), a.narrow);
    add(a.narrow, a.x);

    b.middle = a.x;
    rms_norm(b.middle, weight(w.norm2), b.normed2);
    matmul(product(b.normed2.size(), w.up), b.normed2, weight(w.up), b.up);
    activate(b.up, b.hidden);
    matmul(product(b.hidden.size(), w.down), b.hidden, weight(w.down), a.narrow);
    add(a.narrow, a.x);
  }
  rms_norm(a.x, weight(layout.norm), a.normed);
  matmul(product(a.normed.size(), layout.head), a.normed, weight(layout.head), a.logits);
}

void Model::backward(Bytes bytes, const CausalAttention& attention, Activations& a,
                     Out gradient) const {
  const Linear head = product(a.normed.size(), layout.head);
  matmul_backward_weight(head, a.normed, a.logits, layout.head.in(gradient));
  matmul_backward_input(head, a.logits, weight(layout.head), a.narrow);
  std::fill(a.dx.begin(), a.dx.end(), 0.0f);
  rms_norm_backward(a.x, weight(layout.norm), a.narrow, a.dx, layout.norm.in(gradient));
  for (int layer = config.layers; layer-- > 0;) {
    backward_perceptron(layer, a, gradient);
    backward_attention(layer, attention, a, gradient);
  }
  embed_backward(bytes, a.dx, layout.embedding.in(gradient));
}

// Here and below a.dx is the gradient of the residual stream: of the sum before, of its first term
// after.
void Model::backward_perceptron(int layer, Activations& a, Out gradient) const {
  const Layout::Block& w = layout.blocks[layer];
  const Activations::Block& b = a.blocks[layer];
  const Linear down = product(b.hidden.size(), w.down), up = product(b.normed2.size(), w.up);
  matmul_backward_weight(down, b.hidden, a.dx, w.down.in(gradient));
  matmul_backward_input(down, a.dx, weight(w.down), a.hidden);
  activate_backward(b.up, a.hidden, a.hidden);
  matmul_backward_weight(up, b.normed2, a.hidden, w.up.in(gradient));
  matmul_backward_input(up, a.hidden, weight(w.up), a.narrow);
  rms_norm_backward(b.middle, weight(w.norm2), a.narrow, a.dx, w.norm2.in(gradient));
}

void Model::backward_attention(int layer, const CausalAttention& attention, Activations& a,
                               Out gradient) const {
  const Layout::Block& w = layout.blocks[layer];
  Activations::Block& b = a.blocks[layer];
  const Linear out = product(b.o.size(), w.out), qkv = product(b.normed1.size(), w.qkv);
  matmul_backward_weight(out, b.o, a.dx, w.out.in(gradient));
  matmul_backward_input(out, a.dx, weight(w.out), b.dout);
  attention.backward(b.qkv, b.o, b.lse, b.dout, b.dqkv);
  matmul_backward_weight(qkv, b.normed1, b.dqkv, w.qkv.in(gradient));
  matmul_backward_input(qkv, b.dqkv, weight(w.qkv), a.narrow);
  rms_norm_backward(b.input, weight(w.norm1), a.narrow, a.dx, w.norm1.in(gradient));
}

}  // namespace gpt
