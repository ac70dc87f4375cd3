// The 25 memory layouts of TransformerEngine as one table: the buffers, and the order of batch,
// sequence and heads in each. The strides follow from these.
#pragma once
#include <cstdint>

#include "te_attention.h"
#include "transformer_engine/fused_attn.h"

namespace tea::nvte {

// The number of tensors in a buffer, and whether they alternate per head (H3D, H2D) or per token
// (3HD, 2HD).
struct Packing {
  int tensors = 1;
  bool per_head = false;
};

struct Layout {
  NVTE_QKV_Layout_Group group;
  NVTE_QKV_Format q, kv;  // NVTE_SBHD, NVTE_BSHD or NVTE_THD

  Packing packing_q() const;
  Packing packing_kv() const;
  bool paged() const { return group == NVTE_Paged_KV_HD_HD_HD; }
  bool ragged_q() const { return q == NVTE_THD; }
  bool ragged_kv() const { return kv == NVTE_THD; }
  bool any_ragged() const { return ragged_q() || ragged_kv(); }
  NVTE_QKV_Format format() const;
};

// Throws "qkv_layout not supported!".
const Layout& layout_of(NVTE_QKV_Layout layout);

// Sizes of one tensor. For pages, batch is their number and rows their slots; ragged: unused.
struct Extent {
  int64_t batch, rows, heads, dim;
};

// Strides in elements of a tensor in `format` that shares its buffer according to `packing`.
tea_strides strides(NVTE_QKV_Format format, Packing packing, const Extent& extent);

// Elements from the start of a shared buffer to the first element of tensor `index`.
int64_t packed_offset(Packing packing, int index, int64_t heads, int64_t dim);

}  // namespace tea::nvte
