// Views of the tensors that share one buffer.
#pragma once
#include "nvte/tensor.h"
#include "transformer_engine/fused_attn.h"

namespace tea::nvte {

// Tensor number `index` of a packed buffer, [rows, heads, head dim]. The scales and amax are the
// buffer's. Throws if the buffer's shape does not have the layout's number of tensors in its place.
Tensor packed_view(const char* name, const Tensor& buffer, NVTE_QKV_Layout layout, int index);

}  // namespace tea::nvte
