// Where a case's elements lie: sizes of the run, strides in full, and the address of each element.
// Written from the comments of te_attention.h, without the library's own geometry.
#pragma once
#include <vector>

#include "kit/case.h"

namespace tea::kit {

struct Extents {
  int64_t batch, max_q, max_kv, tokens_q, tokens_kv, pages, table_pages;
  std::vector<int64_t> len_q, len_kv;      // [batch]
  std::vector<int64_t> start_q, start_kv;  // [batch + 1], first row in a ragged buffer
  std::vector<int32_t> table_k, table_v;   // [batch][table_pages]; -1: not used
};
Extents extents(const Case& c);

// The problem with the strides of c.layout filled in. Throws Error if the layout does not fit.
Problem placed(const Case& c, const Extents& e);

// Elements from the base of a packed storage to each of its tensors.
struct Offsets {
  int64_t k = 0, v = 0;
};
Offsets packed_offsets(const Case& c);
bool packs_q(Layout layout);
bool packs_kv(Layout layout);

// The strides that zero stands for.
tea_strides resolved(const Problem& p, const Extents& e, const tea_strides& given, bool query,
                     int64_t dim);
tea_strides resolved_lse(const Problem& p, const Extents& e);
tea_bias_strides resolved_bias(const Problem& p, const Extents& e, const tea_bias_strides& given);

}  // namespace tea::kit
