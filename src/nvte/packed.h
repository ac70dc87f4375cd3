// Views of the tensors that share one buffer.
#pragma once
#include "nvte/tensor.h"
#include "transformer_engine/fused_attn.h"

namespace tea::nvte {

// Tensor `index` of a packed buffer, [rows, heads, head dim], with the scales and amax of the
// buffer. Throws if the buffer's shape does not contain the layout's number of tensors.
Tensor packed_view(const char* name, const Tensor& buffer, NVTE_QKV_Layout layout, int index);

}  // namespace tea::nvte
