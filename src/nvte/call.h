// One call of the C API: its options and sizes as values (Work), and its tensors. The entry point
// collects them, so that no other function takes a long list of parameters.
#pragma once
#include <cstdint>

#include "nvte/tensor.h"
#include "transformer_engine/fused_attn.h"

namespace tea::nvte {

inline int64_t signed_size(size_t size) { return static_cast<int64_t>(size); }

// In the order of the C API's parameters.
struct Options {
  NVTE_QKV_Layout layout = NVTE_BSHD_BSHD_BSHD;
  NVTE_Bias_Type bias = NVTE_NO_BIAS;
  NVTE_Mask_Type mask = NVTE_NO_MASK;
  NVTE_Softmax_Type softmax = NVTE_VANILLA_SOFTMAX;
  int64_t window_left = -1, window_right = -1;  // -1: no bound
  bool bottom_right = false;                    // for windows without a causal mask
  float scale = 1, dropout = 0;
  bool training = false, max_logit = false, deterministic = false;
};

struct Pages {
  int64_t count = 0, size = 0, columns = 0;  // columns: of the page table
};

struct Sizes {
  int64_t batch = 0, heads_q = 0, heads_kv = 0, max_q = 0, max_kv = 0, dim_qk = 0, dim_v = 0;
  int64_t tokens_q = 0, tokens_kv = 0;  // for ragged sides
  Pages k = {}, v = {};                 // for paged layouts
};

struct Types {
  NVTEDType q, o, dout, dqkv, bias;  // K and V have the type of Q
};

// Everything that determines the computation of a call, without tensors and pointers.
struct Work {
  Options options;
  Sizes sizes;
  Types types;
  int bias_broadcast = 0;  // TEA_BROADCAST_* of the bias
  bool gaps = false;       // ragged sequences start at cu_seqlens_*_padded
};

struct Call {
  Options options;
  int64_t max_q, max_kv;
  const Tensor *q, *k, *v, *s;
  const Tensor *cu_seqlens_q, *cu_seqlens_kv, *cu_seqlens_q_padded, *cu_seqlens_kv_padded;
  Tensor *workspace;
  cudaStream_t stream;
};

struct ForwardCall : Call {
  const Tensor *bias, *softmax_offset, *o, *table_k, *table_v, *rng_state;
  NVTETensorPack *aux;
};

// The auxiliary tensors of forward that backward needs.
struct BackwardAux {
  void *lse, *rng_state, *bias, *softmax_offset;
};

struct BackwardCall : Call {
  const Tensor *o, *dout, *dp, *dq, *dk, *dv, *dbias, *dsoftmax_offset;
  BackwardAux aux;
};

}  // namespace tea::nvte
