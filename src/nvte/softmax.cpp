// The softmax entry points of the TransformerEngine C API, based on src/ops/softmax.h.
#include "ops/softmax.h"

#include "nvte/boundary.h"
#include "nvte/operands.h"
#include "transformer_engine/softmax.h"

namespace tea::nvte {
namespace {

// Only `shaped` determines the sizes: the input of forward, the output of backward.
tea_scaled_softmax arguments(const Operand& shaped, tea_score_mask kind, float scale) {
  tea_scaled_softmax a{};
  a.dtype = required_dtype(shaped, 1u << TEA_FP16 | 1u << TEA_BF16);
  a.kind = kind;
  a.scale = scale;
  const bool square = kind == TEA_SCORE_MASK_CAUSAL;  // [b * h, s, s]
  require_rank(shaped, square ? 3 : 4, square ? 3 : 4);
  if (square)
    TEA_REQUIRE(shaped.size(1) == shaped.size(2), std::string(shaped.name) + ".shape[2]",
                shaped.size(2), "shape[1], " + shown(shaped.size(1)));
  a.batch = shaped.size(0), a.heads = square ? 1 : shaped.size(1);
  a.rows = shaped.size(-2), a.cols = shaped.size(-1);
  return a;
}

void check_like(const Operand& operand, const Operand& shaped) {
  require_same_type(operand, shaped);
  require_elements(operand, shaped.elements());
}

void forward(const Operand& input, const Operand& output, tea_scaled_softmax a,
             const Place& place) {
  check_like(output, input);
  a.input = input.data(), a.output = output.data();
  scaled_softmax_forward(a, place);
}

struct Gradients {
  Operand incoming, results, output;
};

void backward(const Gradients& g, tea_score_mask kind, float scale, cudaStream_t stream) {
  tea_scaled_softmax a = arguments(g.output, kind, scale);
  check_like(g.incoming, g.output);
  check_like(g.results, g.output);
  a.input = g.results.data(), a.dout = g.incoming.data(), a.output = g.output.data();
  scaled_softmax_backward(a, place_of({g.incoming, g.results, g.output}, stream));
}

// shape[0] determines whether the batch shares the mask.
void set_mask(tea_scaled_softmax& a, const Operand& mask) {
  a.mask_batch = mask.size(0) == 1 ? 1 : a.batch;
  require_elements(mask, a.mask_batch * a.rows * a.cols);
  a.mask = static_cast<const uint8_t*>(mask.data());
}

}  // namespace
}  // namespace tea::nvte

using tea::nvte::Operand;
using tea::nvte::place_of;

// The entry points without a mask tensor differ only in the kind.
#define TEA_NVTE_SOFTMAX(name, kind)                                                          \
  void name##_forward(const NVTETensor input, NVTETensor softmax_results, float scale_factor, \
                      cudaStream_t stream) {                                                  \
    TEA_NVTE_EXPORTED({                                                                       \
      const Operand x("input", input), y("softmax_results", softmax_results);                 \
      tea::nvte::forward(x, y, tea::nvte::arguments(x, kind, scale_factor),                   \
                         place_of({x, y}, stream));                                           \
    });                                                                                       \
  }                                                                                           \
  TEA_NVTE_SOFTMAX_BACKWARD(name, kind)

#define TEA_NVTE_SOFTMAX_BACKWARD(name, kind)                                              \
  void name##_backward(const NVTETensor incoming_grads, const NVTETensor softmax_results,  \
                       NVTETensor output_grads, float scale_factor, cudaStream_t stream) { \
    TEA_NVTE_EXPORTED({                                                                    \
      tea::nvte::backward({{"incoming_grads", incoming_grads},                             \
                           {"softmax_results", softmax_results},                           \
                           {"output_grads", output_grads}},                                \
                          kind, scale_factor, stream);                                     \
    });                                                                                    \
  }

TEA_NVTE_SOFTMAX(nvte_scaled_softmax, TEA_SCORE_MASK_NONE)
TEA_NVTE_SOFTMAX(nvte_scaled_upper_triang_masked_softmax, TEA_SCORE_MASK_CAUSAL)
TEA_NVTE_SOFTMAX(nvte_scaled_aligned_causal_masked_softmax, TEA_SCORE_MASK_CAUSAL_BOTTOM_RIGHT)
TEA_NVTE_SOFTMAX_BACKWARD(nvte_scaled_masked_softmax, TEA_SCORE_MASK_GIVEN)

void nvte_scaled_masked_softmax_forward(const NVTETensor input, const NVTETensor mask,
                                        NVTETensor softmax_results, float scale_factor,
                                        cudaStream_t stream) {
  TEA_NVTE_EXPORTED({
    const Operand x("input", input), m("mask", mask), y("softmax_results", softmax_results);
    tea_scaled_softmax a = tea::nvte::arguments(x, TEA_SCORE_MASK_GIVEN, scale_factor);
    tea::nvte::set_mask(a, m);
    tea::nvte::forward(x, y, a, place_of({x, m, y}, stream));
  });
}
