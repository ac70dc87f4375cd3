// A byte-level GPT: pre-norm blocks of causal attention and a two-layer perceptron.
#pragma once
#include <functional>
#include <vector>

#include "attention.h"
#include "layers.h"
#include "text.h"

namespace gpt {

// One weight in the flat array of all of them.
struct Piece {
  int64_t offset = 0, rows = 0, cols = 0;
  float spread = 0;  // standard deviation at the start; 0: a gain, which starts at 1
  template <class T>
  std::span<T> in(std::span<T> flat) const {
    return flat.subspan(offset, rows * cols);
  }
};

// Where each weight lies. One flat array is what the optimizer and the sum over shards see.
struct Layout {
  struct Block {
    Piece norm1, qkv, out, norm2, up, down;
  };
  explicit Layout(const Config& config);

  Piece embedding, norm, head;
  std::vector<Block> blocks;
  int64_t matrices = 0;  // the first so many weights belong to matrices, the rest are gains
  int64_t size = 0;
};

// The activations of forward that backward needs, for one span of tokens.
struct Activations {
  struct Block {
    std::vector<float> input, normed1, qkv, o, lse, middle, normed2, up, hidden;
    std::vector<float> dout, dqkv;  // of attention; kept to be checked against the oracle
  };
  Activations(const Config& config, int64_t tokens);

  std::vector<Block> blocks;
  std::vector<float> x, normed, logits;         // after the last block
  std::vector<float> dx, wide, narrow, hidden;  // scratch
};

// Attention of one layer: from [tokens, qkv_dim] to [tokens, q_dim].
using Attend = std::function<void(int layer, In qkv, Out o)>;

class Model {
 public:
  explicit Model(const Config& config);

  const Config config;
  const Layout layout;
  std::vector<float> weights;

  // Fills a.logits [tokens, 256] and what backward needs.
  void forward(Bytes bytes, const Attend& attend, Activations& a) const;
  // From the gradient in a.logits to `gradient` (+=), which lies as the weights do.
  void backward(Bytes bytes, const CausalAttention& attention, Activations& a, Out gradient) const;

 private:
  // The weight, and the size of the product with it.
  In weight(const Piece& piece) const { return piece.in(In(weights)); }
  void backward_perceptron(int layer, Activations& a, Out gradient) const;
  void backward_attention(int layer, const CausalAttention& attention, Activations& a,
                          Out gradient) const;
};

}  // namespace gpt
