/* softmax.h: softmax over scores in memory, through TransformerEngine's C API (names and signatures
   of TransformerEngine f04b094c), for attention that computes S = Q K^T, softmax and P V
   separately.

   All tensors are dense fp16 or bf16 of one shape and type; arithmetic has higher precision, with
   one rounding at the end. Any number of rows and columns. scale_factor multiplies the scores;
   forward rounds it to the tensors' type first. Functions throw std::runtime_error, so C++ must
   call them. */
#ifndef TRANSFORMER_ENGINE_SOFTMAX_H_
#define TRANSFORMER_ENGINE_SOFTMAX_H_
#include "transformer_engine.h"

#pragma GCC visibility push(default)

#ifdef __cplusplus
extern "C" {
#endif

/* [b, h, sq, sk]. Backward: dx = scale (y dy - y sum(y dy)); output_grads may be incoming_grads. */
void nvte_scaled_softmax_forward(const NVTETensor input, NVTETensor softmax_results,
                                 float scale_factor, cudaStream_t stream);
void nvte_scaled_softmax_backward(const NVTETensor incoming_grads, const NVTETensor softmax_results,
                                  NVTETensor output_grads, float scale_factor, cudaStream_t stream);

/* mask: 1 byte per element, [1 or b, 1, sq, sk]; where it is 1 the scaled score becomes -10000. A
   row whose largest score is exactly -10000 becomes zeros. Backward: nvte_scaled_softmax_backward
   computes the same gradient. */
void nvte_scaled_masked_softmax_forward(const NVTETensor input, const NVTETensor mask,
                                        NVTETensor softmax_results, float scale_factor,
                                        cudaStream_t stream);
void nvte_scaled_masked_softmax_backward(const NVTETensor incoming_grads,
                                         const NVTETensor softmax_results, NVTETensor output_grads,
                                         float scale_factor, cudaStream_t stream);

/* [b * h, s, s]: row q attends to k <= q; masked elements are written as 0, also in the gradient.
 */
void nvte_scaled_upper_triang_masked_softmax_forward(const NVTETensor input,
                                                     NVTETensor softmax_results, float scale_factor,
                                                     cudaStream_t stream);
void nvte_scaled_upper_triang_masked_softmax_backward(const NVTETensor incoming_grads,
                                                      const NVTETensor softmax_results,
                                                      NVTETensor output_grads, float scale_factor,
                                                      cudaStream_t stream);

/* [b, h, sq, sk]: row q attends to k <= q + sk - sq; masked elements and rows without keys are 0.
 */
void nvte_scaled_aligned_causal_masked_softmax_forward(const NVTETensor input,
                                                       NVTETensor softmax_results,
                                                       float scale_factor, cudaStream_t stream);
void nvte_scaled_aligned_causal_masked_softmax_backward(const NVTETensor incoming_grads,
                                                        const NVTETensor softmax_results,
                                                        NVTETensor output_grads, float scale_factor,
                                                        cudaStream_t stream);

#ifdef __cplusplus
} /* extern "C" */
#endif

#pragma GCC visibility pop

#endif
