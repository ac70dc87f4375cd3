// Zero fill of the tokens of ragged buffers that belong to no sequence.
#pragma once
#include <initializer_list>

#include "gpu/arguments.h"

namespace tea::portable {

struct GapTensor {
  StridedTensor rows;
  int32_t heads, dim;
};

// On a ragged side, writes zeros to the rows of the tensors that belong to no sequence; with
// fill_statistics also -infinity to LSE and MAX, and zero to SUM_EXP. On other sides does nothing.
void fill_gaps(const AttentionArguments& args, const SequenceLayout& layout,
               std::initializer_list<GapTensor> tensors, bool fill_statistics, void* stream);

}  // namespace tea::portable
