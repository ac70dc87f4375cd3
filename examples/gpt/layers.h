// The layers that are neither a matrix product nor attention, each with its gradient. Tensors are
// rows of features; a gradient marked += is added to, because several paths meet there.
#pragma once
#include "matmul.h"

namespace gpt {

// y = table[bytes], rows of y.size() / bytes.size() features.
void embed(std::span<const uint8_t> bytes, In table, Out y);
void embed_backward(std::span<const uint8_t> bytes, In dy, Out dtable);  // dtable +=

// y = x / rms(x) * gain, row by row (RMSNorm, Zhang and Sennrich 2019).
void rms_norm(In x, In gain, Out y);
void rms_norm_backward(In x, In gain, In dy, Out dx, Out dgain);  // dx +=, dgain +=

// y = max(x, 0)^2 (squared ReLU, So et al. 2021): as good as GELU here and a loop that vectorises.
void activate(In x, Out y);
void activate_backward(In x, In dy, Out dx);  // dx may be dy

void add(In x, Out y);  // y += x

// Sum over the rows of -log softmax(logits)[target], in nats. `logits` becomes the gradient of
// that sum times `scale`.
double cross_entropy(std::span<const uint8_t> targets, float scale, Out logits);

}  // namespace gpt
